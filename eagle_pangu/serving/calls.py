"""What surrounds every call of a service: the readiness gate, the log context, the error table.

One interceptor, so that servicers stay short: they raise, and never see a call before the service is ready or once it
drains. Health and reflection pass untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from eagle_pangu.serving.errors import ServiceError, UnavailableError, abort_with
from eagle_pangu.serving.logs import get_logger
from protos.errors import InvalidFieldError

REQUEST_ID_KEY = "x-request-id"
INFRASTRUCTURE = "/grpc."

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs only
Behaviour = Callable[[Any, Any], Any]


log = get_logger(__name__)


class PeerStalledError(ServiceError):
    """The peer reads nothing. ABORTED: the call cannot go on, but the peer may make it again."""

    code = grpc.StatusCode.ABORTED


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls while the gate is closed; maps what a servicer raises to a status; ends streams that nobody reads.

    Attributes:
        refusal: Why new calls are refused with UNAVAILABLE; None: they are taken. Running calls are never touched.
    """

    def __init__(self, refusal: str | None, write_seconds: float) -> None:
        self.refusal = refusal
        self._write_seconds = write_seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call (grpc.aio's hook)."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(INFRASTRUCTURE):
            return handler
        if self.refusal is not None:
            return _refused(self.refusal)
        _bind_log_context(handler_call_details)
        return _mapped(handler, self._write_seconds)


def _bind_log_context(call: grpc.HandlerCallDetails) -> None:
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(method=call.method)
    for key, value in call.invocation_metadata or ():
        if key == REQUEST_ID_KEY:
            structlog.contextvars.bind_contextvars(request_id=value)


def _refused(reason: str) -> Handler:
    async def refuse(_requests: AsyncIterable[object], context: Any) -> None:
        await abort_with(context, UnavailableError(reason))

    # A stream handler reads nothing before it answers, so it refuses calls of every shape.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _mapped(handler: Handler, write_seconds: float) -> Handler:
    read, write = handler.request_deserializer, handler.response_serializer
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(_one_answer(_reading(handler.unary_unary, read)), None, write)
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(_one_answer(handler.stream_unary), read, write)
    if handler.unary_stream:
        behaviour = _many_answers(_reading(handler.unary_stream, read), write_seconds)
        return grpc.unary_stream_rpc_method_handler(behaviour, None, write)
    assert handler.stream_stream is not None
    return grpc.stream_stream_rpc_method_handler(_many_answers(handler.stream_stream, write_seconds), read, write)


def _reading(behaviour: Behaviour, deserializer: Callable[[bytes], Any] | None) -> Behaviour:
    """The same over a request's bytes: where a deserializer fails, grpc.aio answers UNKNOWN and logs a crash."""

    def read_and_answer(request: bytes, context: Any) -> Any:
        try:
            message = request if deserializer is None else deserializer(request)
        except DecodeError as error:
            raise InvalidFieldError("message", f"expected a request, got bytes that are none: {error}") from error
        return behaviour(message, context)

    return read_and_answer


def _one_answer(behaviour: Behaviour) -> Behaviour:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the table decides what the peer reads
            await abort_with(context, error)

    return answer


def _many_answers(behaviour: Behaviour, write_seconds: float) -> Behaviour:
    async def answer(request: Any, context: Any) -> None:
        try:
            # Closed here, not by the garbage collector: the end of the stream must free the session at once.
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await _write(context, response, write_seconds)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the table decides what the peer reads
            await abort_with(context, error)

    return answer


async def _write(context: Any, response: Any, seconds: float) -> None:
    """Flow control holds a message back while the peer reads none; a peer must not hold a slot in this way for ever."""
    try:
        async with asyncio.timeout(seconds):
            await context.write(response)
    except TimeoutError:
        log.warning("peer stalled", write_seconds=seconds)
        raise PeerStalledError(f"expected the messages of the stream to be read within {seconds:g} s") from None
