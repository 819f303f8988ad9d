"""Answers of GenerationService on the way to stdout: as text while they come, or as one plain object."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from protos.v1 import generation_pb2, sampling_pb2

FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}
_TIMINGS = generation_pb2.RoundTimings.DESCRIPTOR.fields


class AnswerPrinter:
    """Writes a stream as it comes; of several answers one at a time, each under a heading, the others' text kept back.

    Args:
        answers: how many there are.
    """

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._kept: dict[int, list[str]] = {}
        self._over: set[int] = set()
        self._current = 0
        self._head()

    def take(self, delta: generation_pb2.GenerateStreamResponse) -> None:
        """The next message."""
        self._kept.setdefault(delta.index, []).append(delta.text)
        if delta.finish_reason:
            self._over.add(delta.index)
        while True:
            for text in self._kept.pop(self._current, ()):
                sys.stdout.write(text)
            sys.stdout.flush()
            if self._current not in self._over:
                return
            sys.stdout.write("\n")
            self._current += 1
            self._head()

    def _head(self) -> None:
        if self._answers > 1 and self._current < self._answers:
            sys.stdout.write(f"--- answer {self._current}\n")


def as_object(response: generation_pb2.GenerateResponse) -> dict[str, Any]:
    """The whole response as plain values, the names those of generation.proto; answer 0 is in the top fields."""
    usage, numerics = response.usage, response.numerics
    return {
        "request_id": response.request_id,
        **_answer(response),
        "usage": {field.name: getattr(usage, field.name) for field in usage.DESCRIPTOR.fields},
        "numerics": {field.name: getattr(numerics, field.name) for field in numerics.DESCRIPTOR.fields},
        "prompt_token_ids": list(response.prompt_token_ids),
        "prompt_logprobs": _logprobs(response.prompt_logprobs),
        "further_answers": [_answer(answer) for answer in response.further_answers],
    }


def _answer(answer: generation_pb2.GenerateResponse | generation_pb2.Answer) -> dict[str, Any]:
    speculation = answer.speculation
    return {
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "finish_reason": FINISH_REASONS.get(answer.finish_reason, "unspecified"),
        "matched_stop": answer.matched_stop,
        "seed": answer.seed if answer.HasField("seed") else None,
        "margins": list(answer.margins),
        "logprobs": _logprobs(answer.logprobs),
        "speculation": {
            "drafter": speculation.drafter,
            "rounds": speculation.rounds,
            "drafted": speculation.drafted,
            "accepted": speculation.accepted,
            "tokens_per_round": round(speculation.tokens_per_round, 4),
            "fallback_rounds": speculation.fallback_rounds,
            "fallback_reasons": list(speculation.fallback_reasons),
            "timings": {field.name: getattr(speculation.timings, field.name) for field in _TIMINGS},
        },
    }


def _logprobs(entries: Iterable[sampling_pb2.TokenLogprobs]) -> list[dict[str, Any]]:
    """bytes: of the token's own text, which may be a part of a character."""
    return [
        {
            "logprob": entry.logprob,
            "bytes": list(entry.token),
            "top": dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True)),
        }
        for entry in entries
    ]
