"""The gRPC face of the orchestrator: admit, parse, validate, call, convert.

What it raises becomes a status in `eagle_pangu.serving.errors`. How answers come about is `orchestrator.answers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import structlog
from grpc.aio import ServicerContext

from eagle_pangu.serving.bootstrap import StartError
from eagle_pangu.serving.errors import ResourceExhaustedError, UnavailableError
from eagle_pangu.serving.logs import get_logger
from orchestrator import messages
from orchestrator.answers import Answers
from orchestrator.deadline import Deadline
from orchestrator.generation import Services
from orchestrator.requests import TEACHER_ONLY, Request
from orchestrator.rounds import Emission
from orchestrator.sessions import REQUEST_ID_KEY, TRACEPARENT_KEY
from orchestrator.teacher_errors import TeacherChangedError
from orchestrator.validation import choose_request_id, read_request
from protos.v1 import generation_pb2, generation_pb2_grpc

Context: TypeAlias = "ServicerContext[Any, Any]"
log = get_logger(__name__)

AnyGenerateRequest = generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves at most so many requests at once.

    Args:
        load: fetches the teacher's model and makes what requests work with; waits for the teacher.
        max_concurrent: requests served at once.
    """

    def __init__(self, load: Callable[[], Awaitable[Services]], max_concurrent: int) -> None:
        self._load = load
        self._max_concurrent = max_concurrent
        self._loaded: Services | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def load(self) -> None:
        """Get ready; requests are refused with UNAVAILABLE before."""
        self._loaded = await self._load()

    async def Generate(  # noqa: N802 -- gRPC's name
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        """The whole answer at once."""
        with self._admitted():
            answers = await self._begin(request, context)
            emissions: list[list[Emission]] = [[] for _ in answers.generations]
            with self._noticing_change():
                async with aclosing(answers.run()) as steps:
                    async for index, emission in steps:
                        emissions[index].append(emission)
            return messages.whole_answer(answers, emissions)

    async def GenerateStream(  # noqa: N802
        self, request: generation_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        """The same answer as deltas, one a round or one a token."""
        with self._admitted():
            answers = await self._begin(request, context)
            deltas = messages.Deltas(answers)
            with self._noticing_change():
                async with aclosing(answers.run()) as steps:
                    async for index, emission in steps:
                        for part in emission.by_token() if answers.request.stream_tokens else [emission]:
                            yield deltas.message(index, part)

    async def GetModelInfo(  # noqa: N802
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        """Teacher, numerics, drafters and limits."""
        services = self._ready()
        names = await services.drafters.names()
        return messages.model_info(services.model, services.limits, names or (), services.drafters.default)

    async def idle(self) -> None:
        """Return once no request is served."""
        await self._idle.wait()

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._active >= self._max_concurrent:
            raise ResourceExhaustedError(f"{self._active} requests are being served, the most that may be at once")
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _begin(self, message: AnyGenerateRequest, context: Context) -> Answers:
        services, deadline = self._ready(), Deadline(context.time_remaining())
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        request_id = choose_request_id(message.options, metadata.get(REQUEST_ID_KEY, ""))
        structlog.contextvars.bind_contextvars(request_id=request_id)
        if request_id.isascii():
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        request = await _read(message, services, request_id, metadata.get(TRACEPARENT_KEY, ""))
        return Answers(request, services, deadline)

    def _ready(self) -> Services:
        if self._loaded is None:
            raise UnavailableError("no teacher yet")
        return self._loaded

    async def _reload(self) -> None:
        try:
            await self.load()
        except StartError as error:
            log.error("the new teacher cannot be used", reason=str(error))

    @contextmanager
    def _noticing_change(self) -> Iterator[None]:
        """A teacher that was replaced by another model is fetched anew, for the requests to come."""
        try:
            yield
        except TeacherChangedError:
            if self._reloading is None or self._reloading.done():
                log.warning("the teacher serves another model; fetching it")
                self._reloading = asyncio.create_task(self._reload())
            raise


async def _read(message: AnyGenerateRequest, services: Services, request_id: str, traceparent: str) -> Request:
    wanted, drafters = message.options.drafter, services.drafters
    names = await drafters.names(wanted) if wanted not in ("", TEACHER_ONLY) else ()
    return await asyncio.to_thread(  # tokenising a long prompt takes a while
        read_request,
        message,
        request_id=request_id,
        limits=replace(services.limits, default_drafter=drafters.default),
        tokenizer=services.model.tokenizer,
        drafters=names,
        traceparent=traceparent,
    )
