"""GenerationService that answers with what it was asked, so that a test reads the request in the answer.

A program of its own: the commands under test run their own event loop. Text that starts with "differ" gets other ids
teacher-only than with a draft; "refuse" is refused; "everything" is answered with the whole request as text format.
Of several answers the later ones come first in the stream, and each begins with its index.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from eagle_pangu.serving.bootstrap import run_service
from protos.errors import InvalidFieldError
from protos.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2

CHUNK = 7


def described(options: generation_pb2.GenerationOptions) -> str:
    """The request in one line."""
    kind = options.WhichOneof("input")
    if kind == "chat":
        asked = ", ".join(f"{message.role} {message.content}" for message in options.chat.messages)
    else:
        asked = options.prompt if kind == "prompt" else str(list(options.prompt_token_ids.ids))
    budget = f"{options.budget.rows}x{options.budget.depth}" if options.HasField("budget") else "-"
    most = options.max_tokens if options.HasField("max_tokens") else "-"
    parts = [f"{kind}: {asked}", f"max {most}", f"stop {list(options.stop)}", f"budget {budget}"]
    return " | ".join([*parts, f"drafter {options.drafter or '-'}", f"eos {options.ignore_eos}", "é€"])


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """One delta for every few characters, one token a character."""

    async def Generate(self, request: Any, context: Any) -> generation_pb2.GenerateResponse:  # noqa: N802
        options = request.options
        deltas = [delta async for delta in self._deltas(options)]
        first, *others = (
            {
                "text": "".join(delta.text for delta in deltas if delta.index == index),
                "token_ids": [token for delta in deltas if delta.index == index for token in delta.token_ids],
                "finish_reason": deltas[-1].finish_reason,
                "speculation": deltas[-1].speculation,
            }
            for index in range(options.n or 1)
        )
        entry = sampling_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=[7], top_logprobs=[-0.25], token=b"\xe2\x82")
        return generation_pb2.GenerateResponse(
            **first,
            usage=deltas[-1].usage,
            further_answers=[generation_pb2.Answer(**other) for other in others],
            margins=[0.25] if options.return_margins else [],
            logprobs=[entry] if options.HasField("logprobs") else [],
            prompt_logprobs=[entry] * 2 if options.HasField("prompt_logprobs") else [],
            prompt_token_ids=[1, 2, 3] if options.echo else [],
        )

    async def GenerateStream(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        async for delta in self._deltas(request.options):
            yield delta

    async def _deltas(
        self, options: generation_pb2.GenerationOptions
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        text = str(options) if options.prompt == "everything" else described(options)
        if "refuse" in text:
            raise InvalidFieldError("max_tokens", "expected at most 10, got 11")
        ids = [ord(character) for character in text.partition(" | ")[0]]
        if "differ" in text and options.drafter == "none":
            ids[-1] += 1
        backwards = list(reversed(range(options.n or 1)))
        for start in range(0, len(text), CHUNK):
            part = slice(start, start + CHUNK)
            for index in backwards:
                begin = f"{index} " if options.n and not start else ""
                yield generation_pb2.GenerateStreamResponse(index=index, text=begin + text[part], token_ids=ids[part])
        usage = generation_pb2.Usage(prompt_tokens=3, completion_tokens=len(ids), cached_prompt_tokens=2)
        for index in backwards:
            yield generation_pb2.GenerateStreamResponse(
                index=index,
                finish_reason=generation_pb2.FINISH_REASON_LENGTH,
                usage=None if index else usage,
                speculation=generation_pb2.SpeculationStats(
                    drafter=options.drafter or "ngram", rounds=4, drafted=9, accepted=6, tokens_per_round=2.5
                ),
            )


class FakeOrchestrator:
    """What the bootstrap runs."""

    service_names = ("eagle_pangu.v1.GenerationService",)

    def register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(FakeGeneration(), server)

    async def start(self) -> None: ...

    def hindrance(self) -> str | None:
        return None

    async def drained(self) -> None: ...

    async def stop(self) -> None: ...


if __name__ == "__main__":
    run_service("fake-orchestrator", lambda _: FakeOrchestrator(), "orchestrator")
