"""Answers of several kinds, and the many ways in which a stream may cut them into messages."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos.v1 import generation_pb2
from protos.v1.sampling_pb2 import TokenLogprobs

Delta = generation_pb2.GenerateStreamResponse
STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True)
class Whole:
    """One answer: an id a token, and a margin and a log-probability that name their token's place."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: int = STOP

    def cut(self, index: int, chance: random.Random) -> list[Delta]:
        """Into messages of 1 .. 4 ids; text comes in any pieces, never before the message of its first token."""
        messages: list[Delta] = []
        read = written = 0
        while read < len(self.token_ids):
            end = min(len(self.token_ids), read + chance.randint(1, 4))
            until = chance.randint(written, len(self.text) * end // len(self.token_ids))
            places = range(read, end)
            messages.append(
                Delta(
                    index=index,
                    token_ids=self.token_ids[read:end],
                    text=self.text[written:until],
                    margins=[place / 8 for place in places],
                    logprobs=[TokenLogprobs(logprob=-place / 8, token=bytes([place])) for place in places],
                )
            )
            read, written = end, until
        last = messages[-1]
        last.text += self.text[written:]
        last.finish_reason = self.finish_reason
        last.seed = 7 + index
        last.speculation.drafter = "scripted"
        return messages


@dataclass(frozen=True)
class Request:
    """The answers of one request, and its prompt's ids."""

    answers: tuple[Whole, ...]
    prompt: tuple[int, ...] = ()

    def stream(self, seed: int) -> list[Delta]:
        """One way to stream it: cuts and the order of the answers' messages are by chance."""
        chance = random.Random(seed)
        queues = [answer.cut(index, chance) for index, answer in enumerate(self.answers)]
        messages: list[Delta] = []
        while left := [queue for queue in queues if queue]:
            messages.append(chance.choice(left).pop(0))
        messages[0].prompt_token_ids.extend(self.prompt)
        messages[0].prompt_tokens.extend(bytes([token % 256]) for token in self.prompt)
        messages[0].prompt_logprobs.extend(TokenLogprobs(logprob=-1.0) for _ in self.prompt[1:])
        messages[-1].usage.prompt_tokens = len(self.prompt)
        messages[-1].numerics.policy = "bitwise"
        return messages


def contents(messages: Iterable[Delta]) -> dict[str, object]:
    """What a caller has who puts the messages together; equal for two streams that deliver the same."""
    messages = list(messages)
    indices = sorted({message.index for message in messages})
    return {
        "answers": [_joined([message for message in messages if message.index == index]) for index in indices],
        "prompt": [token for message in messages for token in message.prompt_token_ids],
        "prompt_tokens": [token for message in messages for token in message.prompt_tokens],
        "prompt_logprobs": [entry.logprob for message in messages for entry in message.prompt_logprobs],
        "usage": [message.usage.prompt_tokens for message in messages if message.HasField("usage")],
        "numerics": [message.numerics.policy for message in messages if message.HasField("numerics")],
    }


def _joined(messages: Sequence[Delta]) -> dict[str, object]:
    return {
        "token_ids": [token for message in messages for token in message.token_ids],
        "text": "".join(message.text for message in messages),
        "margins": [margin for message in messages for margin in message.margins],
        "logprobs": [(entry.logprob, entry.token) for message in messages for entry in message.logprobs],
        "ends": [(message.finish_reason, message.seed) for message in messages if message.finish_reason],
        "drafters": [message.speculation.drafter for message in messages if message.HasField("speculation")],
    }


FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
SHORT = Request((Whole((5, 6, 7, 8, 9), f"a{FAMILY}e\N{COMBINING ACUTE ACCENT}"),), prompt=(1, 2, 3))
THREE = Request(
    (
        Whole(tuple(range(10)), "the first of them"),
        Whole(tuple(range(10)), "the first of them"),
        Whole((200, 201), f"{FAMILY}{FAMILY}", LENGTH),
    ),
    prompt=(1, 2),
)
