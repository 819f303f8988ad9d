"""What both forms of a response have in common: envelope, usage, and our own objects beside OpenAI's.

Ours: `token_ids`, `speculation`, `seed` and `matched_stop` of a choice, `numerics` and, with echo, `prompt_token_ids`
of a response.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from protos.v1 import generation_pb2

FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}
FINGERPRINT_DIGITS = 12

Json = dict[str, Any]
AnyAnswer = generation_pb2.GenerateResponse | generation_pb2.Answer
Delta = generation_pb2.GenerateStreamResponse


@dataclass(frozen=True)
class Envelope:
    """What every object of one request begins with.

    id: with the request id in it. model: the name served. system_fingerprint: see `system_fingerprint`.
    """

    id: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, object_name: str, **content: Any) -> Json:
        """A response or a chunk of that kind."""
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **content,
        }


def system_fingerprint(info: generation_pb2.GetModelInfoResponse) -> str:
    """Differs where the same request may give other tokens: another model or tokenizer, dtype, policy or mode."""
    both = (info.teacher.SerializeToString(deterministic=True), info.numerics.SerializeToString(deterministic=True))
    return f"fp_{hashlib.sha256(b''.join(both)).hexdigest()[:FINGERPRINT_DIGITS]}"


def answers_of(response: generation_pb2.GenerateResponse) -> list[AnyAnswer]:
    """All n of them, in order."""
    return [response, *response.further_answers]


def ending(answer: AnyAnswer | Delta) -> Json:
    """What is known of a choice at its end."""
    return {
        "finish_reason": FINISH_REASONS[answer.finish_reason],
        "matched_stop": answer.matched_stop or None,
        "seed": answer.seed if answer.HasField("seed") else None,
        "speculation": plain(answer.speculation),
    }


def extras(message: generation_pb2.GenerateResponse | Delta) -> Json:
    """Our own fields of a response, or of the chunk in which they come."""
    found: Json = {}
    if message.prompt_token_ids:
        found["prompt_token_ids"] = list(message.prompt_token_ids)
    if message.HasField("numerics"):
        found["numerics"] = plain(message.numerics)
    return found


def usage(counted: generation_pb2.Usage) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_prompt_tokens},
    }


def plain(message: Message) -> Json:
    """A message of scalars, lists of them, and such messages, with every field under its own name."""
    values: Json = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if descriptor.message_type is not None:
            values[descriptor.name] = plain(value)
        else:
            values[descriptor.name] = list(value) if descriptor.is_repeated else value
    return values
