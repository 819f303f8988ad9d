"""One turn asked of a running orchestrator, timed from outside: messages in, an `Answer` out, whole or streamed.

The only module of the benchmark that knows messages of Generate on the wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import grpc.aio

from eagle_pangu.evaluation.latency import Arrival, StreamedAnswer
from eagle_pangu.evaluation.records import Answer, Message, Numerics, Timings
from protos.v1 import generation_pb2, generation_pb2_grpc, tree_pb2

TEACHER_ONLY = "none"
CANCELLED = "cancelled"
READY_SECONDS = 30.0

FINISH_REASONS: dict[int, str] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


class AskError(RuntimeError):
    """The orchestrator gave no answer; the message names the request and the status."""


@dataclass(frozen=True)
class RequestLimits:
    """What every request of a run asks for: most tokens of an answer; drafted rows and depth of a tree."""

    max_tokens: int
    rows: int
    depth: int


class Teacher(NamedTuple):
    """Who decides the tokens: the model's name as configured, its tokenizer's hash, how it computes."""

    model: str
    tokenizer_sha256: str
    numerics: Numerics


class Asker:
    """Asks one orchestrator."""

    def __init__(self, channel: grpc.aio.Channel, limits: RequestLimits) -> None:
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._limits = limits

    async def teacher(self) -> Teacher:
        """The teacher behind the orchestrator.

        Raises:
            AskError: no orchestrator within READY_SECONDS, or it refuses.
        """
        try:
            info = await self._stub.GetModelInfo(
                generation_pb2.GetModelInfoRequest(), wait_for_ready=True, timeout=READY_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise _ask_error("model info", error) from error
        told = info.numerics
        numerics = Numerics(
            told.dtype,
            told.policy,
            told.mode,
            told.degraded_reason,
            told.attention,
            told.attention_fallback_reason,
        )
        return Teacher(info.teacher.model, info.teacher.tokenizer_sha256, numerics)

    async def ask(self, messages: Sequence[Message], drafter: str, request_id: str) -> Answer:
        """The answer of `drafter` ("none": teacher-only; empty: the server's default) to a conversation.

        Its time is that of the whole unary call on this process's monotonic clock.

        Raises:
            AskError: any status but OK, or an answer without a token.
        """
        options = self._options(messages, drafter, request_id)
        started = time.perf_counter()
        try:
            response = await self._stub.Generate(generation_pb2.GenerateRequest(options=options))
        except grpc.aio.AioRpcError as error:
            raise _ask_error(request_id, error) from error
        seconds = time.perf_counter() - started
        if not response.token_ids:
            raise AskError(f"{request_id}: the answer holds no token")
        return _answer(response, response.token_ids, response.margins, response.text, seconds)

    async def ask_streamed(
        self,
        messages: Sequence[Message],
        drafter: str,
        request_id: str,
        *,
        arrived: float,
        max_tokens: int | None = None,
        cancel_after: float | None = None,
    ) -> StreamedAnswer:
        """As `ask`, delta by delta.

        Args:
            messages: the conversation.
            drafter: by name.
            request_id: of the request.
            arrived: on `time.perf_counter`; the answer's times count from there.
            max_tokens: of this answer; None: the run's.
            cancel_after: seconds after which the call is cancelled; what came until then is the answer. None: never.

        Raises:
            AskError: any status but OK, or a whole answer without a token.
        """
        options = self._options(messages, drafter, request_id, max_tokens)
        heard = _Heard(arrived, request_id)
        call = self._stub.GenerateStream(generation_pb2.GenerateStreamRequest(options=options))
        try:
            async with asyncio.timeout(cancel_after):
                async for message in call:
                    heard.add(message)
        except TimeoutError:
            if heard.last.finish_reason:
                return heard.answered()  # the last message was there already
            return heard.cancelled()
        except grpc.aio.AioRpcError as error:
            raise _ask_error(request_id, error) from error
        finally:
            call.cancel()  # no effect on a call that is over
        return heard.answered()

    def _options(
        self, messages: Sequence[Message], drafter: str, request_id: str, max_tokens: int | None = None
    ) -> generation_pb2.GenerationOptions:
        return generation_pb2.GenerationOptions(
            request_id=request_id,
            chat=generation_pb2.ChatMessages(
                messages=[generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
            ),
            max_tokens=self._limits.max_tokens if max_tokens is None else max_tokens,
            drafter=drafter,
            budget=tree_pb2.TreeBudget(rows=self._limits.rows, depth=self._limits.depth),
            return_margins=True,
        )


class _Heard:
    """What has come of one streamed answer."""

    def __init__(self, arrived: float, request_id: str) -> None:
        self.last = generation_pb2.GenerateStreamResponse()
        self._arrived = arrived
        self._request_id = request_id
        self._arrivals: list[Arrival] = []
        self._token_ids: list[int] = []
        self._margins: list[float] = []
        self._text: list[str] = []

    def add(self, message: generation_pb2.GenerateStreamResponse) -> None:
        """One more message."""
        self.last = message
        self._token_ids += message.token_ids
        self._margins += message.margins
        self._text.append(message.text)
        if message.token_ids:
            self._arrivals.append(Arrival(time.perf_counter() - self._arrived, len(message.token_ids)))

    def answered(self) -> StreamedAnswer:
        """The whole answer."""
        if not self._token_ids:
            raise AskError(f"{self._request_id}: the answer holds no token")
        seconds = time.perf_counter() - self._arrived
        answer = _answer(self.last, self._token_ids, self._margins, "".join(self._text), seconds)
        return StreamedAnswer(answer, tuple(self._arrivals))

    def cancelled(self) -> StreamedAnswer:
        """What there is of an answer that its caller left; its rounds and times nobody told."""
        answer = Answer(
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            finish_reason=CANCELLED,
            seconds=time.perf_counter() - self._arrived,
            prompt_tokens=0,
            request_id=self._request_id,
            margins=tuple(self._margins),
        )
        return StreamedAnswer(answer, tuple(self._arrivals))


def _answer(
    told: generation_pb2.GenerateResponse | generation_pb2.GenerateStreamResponse,
    token_ids: Sequence[int],
    margins: Sequence[float],
    text: str,
    seconds: float,
) -> Answer:
    """told: the response, or the last message of a stream, which tells of the whole."""
    stats = told.speculation
    return Answer(
        token_ids=tuple(token_ids),
        text=text,
        finish_reason=FINISH_REASONS.get(told.finish_reason, "unspecified"),
        seconds=seconds,
        prompt_tokens=told.usage.prompt_tokens,
        request_id=told.request_id,
        margins=tuple(margins),
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        drafter=stats.drafter or TEACHER_ONLY,
        fallback_rounds=stats.fallback_rounds,
        fallback_reasons=tuple(stats.fallback_reasons),
        load_limited_rounds=stats.load_limited_rounds,
        timings=Timings(**{field.name: getattr(stats.timings, field.name) for field in fields(Timings)}),
    )


def _ask_error(what: str, error: grpc.aio.AioRpcError) -> AskError:
    return AskError(f"{what}: {error.code().name}: {error.details()}")
