"""GenerationService over a vocabulary of the 256 bytes, which answers what a test says and keeps what it was asked.

It refuses what the contract refuses of the fields that the HTTP front sets by itself, so that a test fails where the
front asks for something that no orchestrator would take.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc.aio
import structlog

from protos.errors import InvalidFieldError, InvalidRequestError
from protos.v1 import generation_pb2, generation_pb2_grpc, model_pb2, sampling_pb2

MODEL = "org/bytes-1"
ROUND = 3
CACHED = 2
NUMERICS = model_pb2.TeacherNumerics(dtype="float32", policy="bitwise", mode="performance", attention="blocked")


def logprobs_of(token_id: int, count: int) -> sampling_pb2.TokenLogprobs:
    """A token's log-probability tells which one it is; the best ones are the ids from it on."""
    best = [(token_id + step) % 256 for step in range(count)]
    return sampling_pb2.TokenLogprobs(
        logprob=-token_id / 256,
        token=bytes([token_id]),
        top_token_ids=best,
        top_logprobs=[-token_id / 256 - step for step in range(count)],
        top_tokens=[bytes([each]) for each in best],
    )


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """One token a byte, three of them a round.

    Attributes:
        asked: Options of every call, in order.
        said: Text of answer 0; answer i says it with i before.
        error: Raised instead of an answer, or in a stream after `error_after` messages; in a stream once, unless
            `error_again`.
        gate: A stream waits for it before every message from number `gate_after` on, a unary call before its answer.
        begun, cancelled, ended: Set when a call runs; when one was cancelled while it waited; when a stream is over.
        flood: Each message of a stream carries as many more characters.
    """

    def __init__(self) -> None:
        self.asked: list[generation_pb2.GenerationOptions] = []
        self.said = "déjà vu"
        self.error: Exception | None = None
        self.error_after = 0
        self.error_again = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.gate_after = 0
        self.begun, self.cancelled, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.flood = 0

    async def Generate(self, request: Any, context: Any) -> generation_pb2.GenerateResponse:  # noqa: N802
        options = self._admit(request.options)
        if options.stream_tokens:
            raise InvalidFieldError("options.stream_tokens", "expected only in streams")
        await self._wait()
        if self.error is not None:
            raise self.error
        first, *others = self._answers(options)
        fields = {field.name: value for field, value in first.ListFields()}
        response = generation_pb2.GenerateResponse(
            **fields, request_id=options.request_id, usage=self._usage(options, [first, *others]), numerics=NUMERICS
        )
        response.further_answers.extend(others)
        response.prompt_token_ids.extend(_echoed_ids(options))
        response.prompt_tokens.extend(bytes([each]) for each in _echoed_ids(options))
        response.prompt_logprobs.extend(_prompt_logprobs(options))
        return response

    async def GenerateStream(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        options = self._admit(request.options)
        try:
            for number, message in enumerate(self._messages(options)):
                if number >= self.gate_after:
                    await self._wait()
                if self.error is not None and number == self.error_after:
                    error = self.error
                    self.error = error if self.error_again else None
                    raise error
                message.text += "." * self.flood
                yield message
        finally:
            self.ended.set()

    async def GetModelInfo(self, request: Any, context: Any) -> generation_pb2.GetModelInfoResponse:  # noqa: N802
        return generation_pb2.GetModelInfoResponse(
            teacher=model_pb2.ModelFingerprint(model=MODEL, vocab_size=256, context_limit=512),
            numerics=NUMERICS,
            drafters=["ngram", "none"],
            max_tokens_limit=100,
            n_limit=4,
        )

    def _admit(self, options: generation_pb2.GenerationOptions) -> generation_pb2.GenerationOptions:
        structlog.contextvars.bind_contextvars(request_id=options.request_id)
        self.asked.append(options)
        refused = []
        if options.HasField("max_tokens") and not 1 <= options.max_tokens <= 100:
            refused.append(InvalidFieldError("options.max_tokens", f"expected 1 to 100, got {options.max_tokens}"))
        for index, each in enumerate(options.stop):
            if not each:
                refused.append(InvalidFieldError("options.stop", "expected 1 to 256 characters, got 0", index))
        if options.logprobs > 20:
            refused.append(InvalidFieldError("options.logprobs", f"expected at most 20, got {options.logprobs}"))
        if not (options.request_id.isprintable() and 1 <= len(options.request_id) <= 128):
            refused.append(InvalidFieldError("options.request_id", "expected at most 128 printable characters"))
        for index, token_id in enumerate(options.prompt_token_ids.ids):
            if token_id > 255:
                refused.append(InvalidFieldError("options.prompt_token_ids.ids", "expected an id in [0, 256)", index))
        if refused:
            raise InvalidRequestError(refused)
        return options

    async def _wait(self) -> None:
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _answers(self, options: generation_pb2.GenerationOptions) -> list[generation_pb2.Answer]:
        return [self._answer(options, index) for index in range(options.n or 1)]

    def _answer(self, options: generation_pb2.GenerationOptions, index: int) -> generation_pb2.Answer:
        said = self.said if index == 0 else f"{index}{self.said}"
        token_ids = list(said.encode())
        length = options.HasField("max_tokens") and options.max_tokens < len(token_ids)
        token_ids = token_ids[: options.max_tokens] if length else token_ids
        text = bytes(token_ids).decode(errors="replace")
        matched = next((stop for stop in options.stop if stop in text), "")
        if matched:
            text = text[: text.index(matched)]
        answer = generation_pb2.Answer(
            text=(bytes(_prompt_ids(options)).decode() if options.echo else "") + text,
            token_ids=token_ids,
            finish_reason=generation_pb2.FINISH_REASON_LENGTH if length else generation_pb2.FINISH_REASON_STOP,
            matched_stop=matched,
            speculation=generation_pb2.SpeculationStats(drafter="ngram", rounds=2 + index, tokens_per_round=2.5),
        )
        if options.temperature:
            answer.seed = (options.seed if options.HasField("seed") else 2**63) + index
        if options.HasField("logprobs"):
            answer.logprobs.extend(logprobs_of(each, options.logprobs) for each in token_ids)
        return answer

    def _messages(self, options: generation_pb2.GenerationOptions) -> Iterable[generation_pb2.GenerateStreamResponse]:
        """A message of each answer in turn: as much text as is whole characters, and at the end the rest."""
        answers = self._answers(options)
        step = 1 if options.stream_tokens else ROUND
        rounds = max(-(-len(answer.token_ids) // step) for answer in answers)
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in answers]
        sent = [0] * len(answers)
        messages = []
        for number in range(rounds):
            for index, answer in enumerate(answers):
                part = slice(number * step, (number + 1) * step)
                ids, last = answer.token_ids[part], (number + 1) * step >= len(answer.token_ids)
                if not ids:
                    continue
                before = (_prompt_ids(options) if options.echo and number == 0 else []) + list(ids)
                sent[index] += len(decoders[index].decode(bytes(before)))
                start = sum(len(each.text) for each in messages if each.index == index)
                message = generation_pb2.GenerateStreamResponse(
                    request_id=options.request_id,
                    index=index,
                    text=answer.text[start:] if last else answer.text[start : sent[index]],
                    token_ids=ids,
                    logprobs=answer.logprobs[part],
                )
                if not messages:
                    message.prompt_token_ids.extend(_echoed_ids(options))
                    message.prompt_tokens.extend(bytes([each]) for each in _echoed_ids(options))
                    message.prompt_logprobs.extend(_prompt_logprobs(options))
                if last:
                    message.finish_reason = answer.finish_reason
                    message.matched_stop = answer.matched_stop
                    message.speculation.CopyFrom(answer.speculation)
                    if answer.HasField("seed"):
                        message.seed = answer.seed
                messages.append(message)
        messages[-1].usage.CopyFrom(self._usage(options, answers))
        messages[-1].numerics.CopyFrom(NUMERICS)
        return messages

    def _usage(
        self, options: generation_pb2.GenerationOptions, answers: list[generation_pb2.Answer]
    ) -> generation_pb2.Usage:
        return generation_pb2.Usage(
            prompt_tokens=len(_prompt_ids(options)),
            completion_tokens=sum(len(answer.token_ids) for answer in answers),
            cached_prompt_tokens=CACHED,
        )


def _prompt_ids(options: generation_pb2.GenerationOptions) -> list[int]:
    kind = options.WhichOneof("input")
    if kind == "prompt_token_ids":
        return list(options.prompt_token_ids.ids)
    text = options.prompt
    if kind == "chat":
        text = "".join(f"<{message.role}>{message.content}" for message in options.chat.messages)
    return list(text.encode())


def _echoed_ids(options: generation_pb2.GenerationOptions) -> list[int]:
    return _prompt_ids(options) if options.echo else []


def _prompt_logprobs(options: generation_pb2.GenerationOptions) -> list[sampling_pb2.TokenLogprobs]:
    if not options.HasField("prompt_logprobs"):
        return []
    return [logprobs_of(each, options.prompt_logprobs) for each in _prompt_ids(options)[1:]]


class FakeOrchestrator:
    """What the bootstrap runs."""

    service_names = ("eagle_pangu.v1.GenerationService",)

    def __init__(self, generation: FakeGeneration) -> None:
        self._generation = generation

    def register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._generation, server)

    async def start(self) -> None: ...

    def hindrance(self) -> str | None:
        return None

    async def drained(self) -> None: ...

    async def stop(self) -> None: ...
