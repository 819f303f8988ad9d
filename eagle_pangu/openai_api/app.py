"""The routes: read a request, ask the orchestrator, give its answer the form that the route has.

It decides nothing about tokens and keeps nothing between requests. Calls are made again, and broken streams go on, as
`eagle_pangu.client` has it; a client is told of an error only after that.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Protocol, TypeVar

import grpc.aio
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eagle_pangu.client.client import GenerationClient
from eagle_pangu.openai_api import chat, completions
from eagle_pangu.openai_api.answers import Delta, Envelope, Json, plain, system_fingerprint
from eagle_pangu.openai_api.connection import while_connected
from eagle_pangu.openai_api.errors import ApiError, error_of
from eagle_pangu.openai_api.options import Question, chat_question, completion_question
from eagle_pangu.openai_api.request_scope import RequestScope
from eagle_pangu.openai_api.requests import ChatRequest, CompletionRequest, GenerationFields, read, require_model
from eagle_pangu.openai_api.streaming import EventStream
from eagle_pangu.serving.health import is_serving
from eagle_pangu.serving.settings import HttpSettings
from protos.v1 import generation_pb2

Result = TypeVar("Result")

GENERATION_SERVICE = "eagle_pangu.v1.GenerationService"
INFO_SECONDS = 10.0


class Form(Protocol):
    """An answer as the objects of one route; see `chat` and `completions`."""

    def whole(self, response: generation_pb2.GenerateResponse) -> Json: ...

    def chunks(self, message: Delta) -> Iterable[Json]: ...

    def usage_chunk(self, counted: generation_pb2.Usage) -> Json: ...


class Front:
    """The endpoints.

    Args:
        client: of the orchestrator.
        health: a channel to it.
        settings: limits.
    """

    def __init__(self, client: GenerationClient, health: grpc.aio.Channel, settings: HttpSettings) -> None:
        self._client = client
        self._health = health
        self._settings = settings
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = read(CompletionRequest, await self._body(request))
        envelope = await self._envelope(request, asked, completions.ID_PREFIX)
        question = completion_question(asked, request.state.request_id)
        return await self._answer(request, asked, question, completions.CompletionForm(asked, envelope))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = read(ChatRequest, await self._body(request))
        envelope = await self._envelope(request, asked, chat.ID_PREFIX)
        question = chat_question(asked, request.state.request_id)
        return await self._answer(request, asked, question, chat.ChatForm(asked, envelope))

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one that is served."""
        return JSONResponse({"object": "list", "data": [self._described(await self._info())]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME, which may hold slashes."""
        info = await self._info()
        require_model(request.path_params["name"], info.teacher.model)
        return JSONResponse(self._described(info))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the orchestrator is serving, else 503; what a readiness probe asks.

        An orchestrator that has lost its teacher is still serving: its requests wait for another one, as long as they
        may. For liveness the port is enough: a front is not mended by a restart when its orchestrator is away.
        """
        if await is_serving(self._health, GENERATION_SERVICE):
            return JSONResponse({"status": "serving"})
        raise ApiError(503, "the orchestrator is not serving", type="server_error", code="unavailable")

    async def _body(self, request: Request) -> bytes:
        limit, body = self._settings.max_message_bytes, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise ApiError(413, f"expected a body of at most {limit} bytes", code="request_too_large")
        return bytes(body)

    async def _info(self) -> generation_pb2.GetModelInfoResponse:
        """Asked anew each time: the teacher may have been replaced by another model."""
        return await _told(self._client.model_info(seconds=INFO_SECONDS))

    async def _envelope(self, request: Request, asked: GenerationFields, prefix: str) -> Envelope:
        """What the response begins with; refuses a model that is not the one served."""
        if asked.user is not None:
            structlog.contextvars.bind_contextvars(user=asked.user)
        info = await self._info()
        require_model(asked.model, info.teacher.model)
        return Envelope(f"{prefix}{request.state.request_id}", info.teacher.model, system_fingerprint(info))

    async def _answer(self, request: Request, asked: GenerationFields, question: Question, form: Form) -> Response:
        if asked.stream:
            objects = self._stream(question, form, with_usage=asked.wants_usage)
            return EventStream(objects, request_id=request.state.request_id, write_seconds=self._settings.write_seconds)
        call = self._client.generate(question.options, seconds=self._settings.request_seconds)
        return JSONResponse(form.whole(await while_connected(_told(call, question.http_field), request.receive)))

    async def _stream(self, question: Question, form: Form, *, with_usage: bool) -> AsyncGenerator[Json]:
        stream = self._client.generate_stream(question.options, seconds=self._settings.request_seconds)
        message = Delta()
        try:
            async with aclosing(stream) as messages:
                async for message in messages:
                    for chunk in form.chunks(message):
                        yield {**chunk, "usage": None} if with_usage else chunk
        except grpc.aio.AioRpcError as error:
            raise error_of(error, question.http_field) from error
        if with_usage:
            yield form.usage_chunk(message.usage)

    def _described(self, info: generation_pb2.GetModelInfoResponse) -> Json:
        """OpenAI's model object, and ours beside it: what requests may ask."""
        return {
            "id": info.teacher.model,
            "object": "model",
            "created": self._created,
            "owned_by": "eagle-pangu",
            "context_limit": info.teacher.context_limit,
            "max_tokens_limit": info.max_tokens_limit,
            "n_limit": info.n_limit,
            "drafters": list(info.drafters),
            "numerics": plain(info.numerics),
        }


def application(client: GenerationClient, health: grpc.aio.Channel, settings: HttpSettings) -> Starlette:
    """The ASGI application; arguments as for `Front`."""
    front = Front(client, health, settings)
    return Starlette(
        routes=[
            Route("/v1/completions", front.completions, methods=["POST"]),
            Route("/v1/chat/completions", front.chat_completions, methods=["POST"]),
            Route("/v1/models", front.models),
            Route("/v1/models/{name:path}", front.model),
            Route("/health", front.health),
        ],
        middleware=[Middleware(RequestScope)],
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_route},
    )


async def _told(call: Awaitable[Result], http_field: Callable[[str], str] = str) -> Result:
    """The answer of a call, its error in the form that a client may read."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_of(error, http_field) from error


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _refuse_route(request: Request, error: Exception) -> Response:
    """An unknown path, or a method that it does not have."""
    assert isinstance(error, HTTPException)
    told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code="unknown_url")
    return JSONResponse(told.body, error.status_code, error.headers)
