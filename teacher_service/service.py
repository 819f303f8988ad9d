"""The gRPC face of the teacher: parse, validate, call, convert.

What it raises becomes a status in `eagle_pangu.serving.errors`; a bad `verify` is answered in band, and its session
goes on. The stream is the session: however it ends, the slot is free again. It computes nothing itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import structlog
from grpc.aio import ServicerContext

from eagle_pangu.serving.errors import FailedPreconditionError, UnavailableError
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.streams import next_message, require_open
from protos.errors import InvalidFieldError, StaleMessageError
from protos.v1 import teacher_pb2, teacher_pb2_grpc, tree_pb2
from teacher_service import messages
from teacher_service.opening import Opening
from teacher_service.pace import Pace
from teacher_service.passes import PassShare
from teacher_service.replies import Chunk, Verdict
from teacher_service.round import Round
from teacher_service.runtime import Runtime
from teacher_service.scheduler import Scheduler
from teacher_service.session import Session, Steps

log = get_logger(__name__)

SIGN_OF_LIFE_SECONDS = 5.0
"""Longest silence while a prompt is read: many may be before it."""

Requests = AsyncIterator[teacher_pb2.VerifyRequest]
Responses = AsyncIterator[teacher_pb2.VerifyResponse]
Context: TypeAlias = "ServicerContext[Any, Any]"


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
            batches=teacher_pb2.BatchStats(batching=settings.batching, **vars(runtime.scheduler.statistics)),
            kv_tokens=runtime.slots.kv_tokens,
            free_kv_tokens=runtime.slots.free_tokens,
            shapes=runtime.shapes,
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
            adds_bos=tokenizer.adds_bos,
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
        session = Session(runtime.engine, opening, runtime.limits, runtime.settings.prefill_chunk, runtime.prefixes)
        lease = await runtime.slots.take(runtime.engine.slot_columns(opening.capacity), opening.priority)
        try:
            waited_us = _microseconds_since(received)
            pace = runtime.pace(opening)
            log.info("session opened", prompt_tokens=len(opening.prompt), slot_wait_us=waited_us)
            opened = teacher_pb2.TeacherSessionOpened(fingerprint=runtime.fingerprint, numerics=runtime.numerics)
            yield teacher_pb2.VerifyResponse(epoch=opening.epoch, opened=opened)
            async for response in _prefill(session, pace, runtime, received, waited_us):
                yield response
            while (request := await read()) is not None:
                yield await _answer(session, pace, runtime, request)
        finally:
            # Not waited for here: it comes after a pass that still runs, and only then is the slot another one's.
            runtime.worker.submit(session, partial(_close, session, runtime.scheduler), lease.give_back)
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


async def _prefill(session: Session, pace: Pace, runtime: Runtime, received: float, queue_us: int) -> Responses:
    """One job for the whole prompt; what goes along with a chunk leaves as it comes."""
    loop, epoch = asyncio.get_running_loop(), session.opening.epoch
    chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

    def deliver(chunk: Chunk) -> None:
        loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    reading = asyncio.ensure_future(runtime.worker.step(session, partial(session.prefill, deliver)))
    reading.add_done_callback(lambda _: chunks.put_nowait(None))
    first_token = None
    try:
        while True:
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_SECONDS):
                    chunk = await chunks.get()
            except TimeoutError:
                if not runtime.stalls():
                    sign = teacher_pb2.Reading(committed_length=session.committed_length)
                    yield teacher_pb2.VerifyResponse(epoch=epoch, reading=sign)
                continue
            if chunk is None:
                break
            first_token = chunk.first_token
            for response in _along(chunk, epoch, runtime.settings.max_message_bytes):
                yield response
        step = await reading
    finally:
        reading.cancel()
    assert first_token is not None
    log.info("prompt prefilled", committed_length=session.committed_length, cached_tokens=session.cached_tokens)
    yield teacher_pb2.VerifyResponse(
        epoch=epoch,
        prefilled=teacher_pb2.Prefilled(
            next_token_id=first_token.token_id,
            committed_length=session.committed_length,
            margin=first_token.margin,
            logprobs=next(iter(messages.write_logprobs(first_token.logprobs)), None),
            timings=_timings(received, queue_us=queue_us + step.queue_us, forward_us=step.run_us, share=session.share),
            cached_tokens=session.cached_tokens,
            advised_rows=pace.next_rows(joins=True),
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


async def _answer(
    session: Session, pace: Pace, runtime: Runtime, request: teacher_pb2.VerifyRequest
) -> teacher_pb2.VerifyResponse:
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
        answer = messages.write_verdict(verdict, _timings(received), pace.advised)
        return teacher_pb2.VerifyResponse(epoch=epoch, verdict=answer)
    pace.heard(message.tree)
    done = await runtime.worker.step(session, partial(_commit_and_verify, session, message))
    verdict, commit_us = done.value
    pace.decided(message.tree, verdict.accepted_rows)
    timings = _timings(
        received,
        queue_us=done.queue_us,
        forward_us=done.run_us - commit_us,
        commit_us=commit_us,
        share=session.share,
    )
    answer = messages.write_verdict(verdict, timings, pace.next_rows())
    answer.timings.total_us = _microseconds_since(received)
    return teacher_pb2.VerifyResponse(epoch=epoch, verdict=answer)


def _commit_and_verify(session: Session, message: Round) -> Steps[_Answered]:
    """One job: the commit of the round before, timed apart, and this round's forward pass."""
    started = time.monotonic()
    session.commit(message)
    commit_us = _microseconds_since(started)
    return _Answered((yield from session.verify(message)), commit_us)


def _close(session: Session, scheduler: Scheduler) -> None:
    scheduler.forget(session)
    session.close()


def _timings(
    received: float, *, queue_us: int = 0, forward_us: int = 0, commit_us: int = 0, share: PassShare | None = None
) -> teacher_pb2.TeacherTimings:
    timings = teacher_pb2.TeacherTimings(queue_us=queue_us, forward_us=forward_us, commit_us=commit_us)
    if share is not None:
        timings.batch_sessions, timings.batch_rows, timings.realign_us = share
    timings.total_us = _microseconds_since(received)
    return timings


def _microseconds_since(start: float) -> int:
    return round((time.monotonic() - start) * 1e6)
