"""One turn asked of a running orchestrator, timed from outside: messages in, an `Answer` out.

The only module of the benchmark that knows messages on the wire.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import grpc.aio

from eagle_pangu.evaluation.records import Answer, Message, Numerics, Timings
from protos.v1 import generation_pb2, generation_pb2_grpc, model_pb2, tree_pb2

TEACHER_ONLY = "none"
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


class Asker:
    """Asks one orchestrator."""

    def __init__(self, channel: grpc.aio.Channel, limits: RequestLimits) -> None:
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._limits = limits

    async def numerics(self) -> Numerics:
        """How the teacher computes.

        Raises:
            AskError: no orchestrator within READY_SECONDS, or it refuses.
        """
        try:
            info = await self._stub.GetModelInfo(
                generation_pb2.GetModelInfoRequest(), wait_for_ready=True, timeout=READY_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise _ask_error("model info", error) from error
        return _numerics(info.numerics)

    async def ask(self, messages: Sequence[Message], drafter: str, request_id: str) -> Answer:
        """The answer of `drafter` ("none": teacher-only; empty: the server's default) to a conversation.

        Its time is that of the whole unary call on this process's monotonic clock.

        Raises:
            AskError: any status but OK, or an answer without a token.
        """
        options = generation_pb2.GenerationOptions(
            request_id=request_id,
            chat=generation_pb2.ChatMessages(
                messages=[generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
            ),
            max_tokens=self._limits.max_tokens,
            drafter=drafter,
            budget=tree_pb2.TreeBudget(rows=self._limits.rows, depth=self._limits.depth),
            return_margins=True,
        )
        started = time.perf_counter()
        try:
            response = await self._stub.Generate(generation_pb2.GenerateRequest(options=options))
        except grpc.aio.AioRpcError as error:
            raise _ask_error(request_id, error) from error
        seconds = time.perf_counter() - started
        if not response.token_ids:
            raise AskError(f"{request_id}: the answer holds no token")
        return _answer(response, seconds)


def _answer(response: generation_pb2.GenerateResponse, seconds: float) -> Answer:
    stats = response.speculation
    return Answer(
        token_ids=tuple(response.token_ids),
        text=response.text,
        finish_reason=FINISH_REASONS.get(response.finish_reason, "unspecified"),
        seconds=seconds,
        prompt_tokens=response.usage.prompt_tokens,
        request_id=response.request_id,
        margins=tuple(response.margins),
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        drafter=stats.drafter or TEACHER_ONLY,
        fallback_rounds=stats.fallback_rounds,
        fallback_reasons=tuple(stats.fallback_reasons),
        timings=Timings(**{field.name: getattr(stats.timings, field.name) for field in fields(Timings)}),
    )


def _numerics(message: model_pb2.TeacherNumerics) -> Numerics:
    return Numerics(message.dtype, message.policy, message.mode, message.degraded_reason)


def _ask_error(what: str, error: grpc.aio.AioRpcError) -> AskError:
    return AskError(f"{what}: {error.code().name}: {error.details()}")
