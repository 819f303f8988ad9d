"""The gRPC face of the teacher: parse, validate, call, convert.

What it raises becomes a status in `eagle_pangu.serving.errors`; a bad `verify` is answered in band, and its session
goes on. The stream is the session: however it ends, the slot is free again. It computes nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import structlog
from grpc.aio import ServicerContext

from eagle_pangu.serving.errors import FailedPreconditionError, UnavailableError
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.serving.streams import next_message, require_open
from eagle_pangu.speculation.engine import Engine
from protos.errors import InvalidFieldError, StaleMessageError
from protos.v1 import model_pb2, teacher_pb2, teacher_pb2_grpc, tree_pb2
from teacher_service import messages
from teacher_service.executor import Executor
from teacher_service.opening import Limits, Opening
from teacher_service.prefix_cache import PrefixCache
from teacher_service.replies import Chunk, Verdict
from teacher_service.round import Round
from teacher_service.session import Session
from teacher_service.slots import Slots

log = get_logger(__name__)

Requests = AsyncIterator[teacher_pb2.VerifyRequest]
Responses = AsyncIterator[teacher_pb2.VerifyResponse]
Context: TypeAlias = "ServicerContext[Any, Any]"


@dataclass(frozen=True)
class Runtime:
    """What the sessions share, once the model is warm."""

    engine: Engine
    executor: Executor
    slots: Slots
    prefixes: PrefixCache
    settings: TeacherSettings

    @cached_property
    def fingerprint(self) -> model_pb2.ModelFingerprint:
        """The model served."""
        return messages.fingerprint_of(self.engine.checkpoint)

    @cached_property
    def numerics(self) -> model_pb2.TeacherNumerics:
        """How it computes."""
        return model_pb2.TeacherNumerics(**self.engine.numerics._asdict())

    @cached_property
    def limits(self) -> Limits:
        """What a session may ask."""
        return Limits(
            vocab_size=self.engine.checkpoint.vocab_size,
            context_limit=self.engine.checkpoint.context_limit,
            slot_capacity=self.settings.slot_capacity,
            max_rows=self.settings.max_rows,
            max_depth=self.settings.max_depth,
        )


class TeacherServicer(teacher_pb2_grpc.TeacherServiceServicer):
    """Answers UNAVAILABLE until `runtime` is set."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None

    async def GetModel(  # noqa: N802 -- gRPC's name
        self, request: teacher_pb2.GetModelRequest, context: Context
    ) -> teacher_pb2.GetModelResponse:
        """The model served and its limits."""
        runtime = self._ready()
        settings = runtime.settings
        return teacher_pb2.GetModelResponse(
            fingerprint=runtime.fingerprint,
            numerics=runtime.numerics,
            max_budget=tree_pb2.TreeBudget(rows=settings.max_rows, depth=settings.max_depth),
            slots=runtime.slots.total,
            free_slots=runtime.slots.free,
            slot_capacity=settings.slot_capacity,
            prefix_cache=teacher_pb2.PrefixCacheStats(**runtime.prefixes.stats()._asdict()),
        )

    async def GetTokenizer(  # noqa: N802
        self, request: teacher_pb2.GetTokenizerRequest, context: Context
    ) -> teacher_pb2.GetTokenizerResponse:
        """What a torch-free peer needs to turn text into ids and back."""
        tokenizer = self._ready().engine.checkpoint.tokenizer
        return teacher_pb2.GetTokenizerResponse(
            tokenizer_json=tokenizer.json,
            chat_template=tokenizer.chat_template,
            special_tokens=tokenizer.special_tokens,
        )

    async def Verify(self, requests: Requests, context: Context) -> Responses:  # noqa: N802
        """One session."""
        runtime = self._ready()
        read = partial(
            next_message,
            requests,
            teacher_pb2.VerifyRequest,
            idle_seconds=runtime.settings.session_idle_seconds,
            setting="teacher.session_idle_seconds",
        )
        first = require_open(await read())
        received = time.monotonic()
        opening = _read_open(first, runtime)
        structlog.contextvars.bind_contextvars(request_id=opening.request_id, epoch=opening.epoch)
        async with runtime.slots.hold(opening.priority):
            waited_us = _microseconds_since(received)
            session = Session(runtime.engine, opening, runtime.limits, runtime.settings.prefill_chunk, runtime.prefixes)
            log.info("session opened", prompt_tokens=len(opening.prompt), slot_wait_us=waited_us)
            try:
                opened = teacher_pb2.TeacherSessionOpened(fingerprint=runtime.fingerprint, numerics=runtime.numerics)
                yield teacher_pb2.VerifyResponse(epoch=opening.epoch, opened=opened)
                async for response in _prefill(session, runtime, received, waited_us):
                    yield response
                while (request := await read()) is not None:
                    yield await _answer(session, runtime, request)
            finally:
                # After a pass that still runs, and before the first one of who gets the slot; not waited for.
                runtime.executor.submit(session, session.close)
                log.info("session ended", rounds=session.rounds, committed_length=session.committed_length)

    def _ready(self) -> Runtime:
        if self.runtime is None:
            raise UnavailableError("the teacher is loading its model")
        return self.runtime


class _Answered(NamedTuple):
    verdict: Verdict
    commit_us: int


def _read_open(request: teacher_pb2.VerifyRequest, runtime: Runtime) -> Opening:
    messages.require_same_ids(runtime.fingerprint, request.open.fingerprint)
    opening = messages.read_opening(request.epoch, request.open)
    opening.validate(runtime.limits)
    return opening


async def _prefill(session: Session, runtime: Runtime, received: float, queue_us: int) -> Responses:
    """One work item a chunk, so that other sessions run in between; what goes along with it leaves as it comes."""
    epoch, forward_us, first_token = session.opening.epoch, 0, None
    while first_token is None:
        step = await runtime.executor.run(session, session.prefill_next)
        queue_us += step.queue_us
        forward_us += step.run_us
        first_token = step.value.first_token
        for response in _along(step.value, epoch, runtime.settings.max_message_bytes):
            yield response
    log.info("prompt prefilled", committed_length=session.committed_length, cached_tokens=session.cached_tokens)
    yield teacher_pb2.VerifyResponse(
        epoch=epoch,
        prefilled=teacher_pb2.Prefilled(
            next_token_id=first_token.token_id,
            committed_length=session.committed_length,
            margin=first_token.margin,
            logprobs=next(iter(messages.write_logprobs(first_token.logprobs)), None),
            timings=_timings(received, queue_us=queue_us, forward_us=forward_us),
            cached_tokens=session.cached_tokens,
        ),
    )


def _along(chunk: Chunk, epoch: int, max_message_bytes: int) -> Iterator[teacher_pb2.VerifyResponse]:
    """What goes along with the reading of a prompt: features and log-probabilities of its tokens, where wanted."""
    if chunk.features is not None:
        for features in messages.write_features(chunk.features, max_message_bytes):
            yield teacher_pb2.VerifyResponse(epoch=epoch, features=features)
    if chunk.prompt_logprobs is not None:
        for found in messages.write_prompt_logprobs(chunk.prompt_logprobs, max_message_bytes):
            yield teacher_pb2.VerifyResponse(epoch=epoch, prompt_logprobs=found)


async def _answer(session: Session, runtime: Runtime, request: teacher_pb2.VerifyRequest) -> teacher_pb2.VerifyResponse:
    """The verdict of one round, or its rejection."""
    received, epoch = time.monotonic(), session.opening.epoch
    if request.WhichOneof("message") == "open":
        raise FailedPreconditionError("message: expected `verify`, got a second `open`; open another stream")
    try:
        message = messages.read_round(request)
        verdict = session.check(message)
    except (InvalidFieldError, StaleMessageError) as error:
        log.warning("round refused", round=request.verify.round, field=error.field, reason=error.reason)
        rejection = messages.write_rejection(request.verify.round, error)
        return teacher_pb2.VerifyResponse(epoch=epoch, rejection=rejection)
    if verdict is not None:  # a repeat
        answer = messages.write_verdict(verdict, _timings(received))
        return teacher_pb2.VerifyResponse(epoch=epoch, verdict=answer)
    done = await runtime.executor.run(session, partial(_commit_and_verify, session, message))
    verdict, commit_us = done.value
    timings = _timings(received, queue_us=done.queue_us, forward_us=done.run_us - commit_us, commit_us=commit_us)
    answer = messages.write_verdict(verdict, timings)
    answer.timings.total_us = _microseconds_since(received)
    return teacher_pb2.VerifyResponse(epoch=epoch, verdict=answer)


def _commit_and_verify(session: Session, message: Round) -> _Answered:
    """One work item: the commit of the round before, timed apart, and this round's forward pass."""
    started = time.monotonic()
    session.commit(message)
    commit_us = _microseconds_since(started)
    return _Answered(session.verify(message), commit_us)


def _timings(
    received: float, *, queue_us: int = 0, forward_us: int = 0, commit_us: int = 0
) -> teacher_pb2.TeacherTimings:
    return teacher_pb2.TeacherTimings(
        queue_us=queue_us, forward_us=forward_us, commit_us=commit_us, total_us=_microseconds_since(received)
    )


def _microseconds_since(start: float) -> int:
    return round((time.monotonic() - start) * 1e6)
