"""A small service for the bootstrap's tests; as a program, a child process that serves it until told to stop.

Its messages are health messages, so that it needs no .proto of its own; the request's `service` says what to do.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from eagle_pangu.serving.bootstrap import StartError, run_service
from eagle_pangu.serving.errors import FailedPreconditionError, ResourceExhaustedError
from eagle_pangu.serving.settings import Settings
from protos.errors import InvalidFieldError, StaleMessageError

NAME = "tests.EchoService"
SECRET = "secret of the exception"

ERRORS: dict[str, Exception] = {
    "invalid": InvalidFieldError("tree.parents", "expected an earlier row", 3),
    "stale": StaleMessageError("round", "expected 3, got 1"),
    "full": ResourceExhaustedError("no slot is free", retry_after_seconds=2.5),
    "precondition": FailedPreconditionError("the first message must be open"),
    "unexpected": KeyError(SECRET),
}


class EchoService:
    """Answers, raises or holds a stream open, as asked."""

    service_names = (NAME,)

    def __init__(self, start_error: Exception | None = None) -> None:
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.release = asyncio.Event()
        self.stream_closed = asyncio.Event()
        self.sessions = 0
        self.stopped = False
        self._start_error = start_error
        self._idle = asyncio.Event()
        self._idle.set()

    def register(self, server: grpc.aio.Server) -> None:
        codecs = (health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString)
        methods = {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo, *codecs),
            "Flood": grpc.stream_stream_rpc_method_handler(self.flood),
            "Hold": grpc.stream_stream_rpc_method_handler(self.hold, *codecs),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))

    async def start(self) -> None:
        await self.may_start.wait()
        if self._start_error is not None:
            raise self._start_error

    def hindrance(self) -> str | None:
        return None

    async def drained(self) -> None:
        await self._idle.wait()

    async def stop(self) -> None:
        self.stopped = True

    async def echo(self, request: Any, _context: Any) -> Any:
        if error := ERRORS.get(request.service):
            raise error
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def hold(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        """Two answers; the second once `release` is set, or once the client half-closes."""
        self.sessions += 1
        self._idle.clear()
        try:
            answer = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
            yield answer
            ended = asyncio.create_task(self._half_closed(requests))
            released = asyncio.create_task(self.release.wait())
            try:
                await asyncio.wait({ended, released}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                released.cancel()
            yield answer
        finally:
            self.sessions -= 1
            self.stream_closed.set()
            if self.sessions == 0:
                self._idle.set()

    async def flood(self, _requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[bytes]:
        """Much more than any buffer takes, until closed."""
        try:
            while True:
                yield bytes(2**16)
        finally:
            self.stream_closed.set()

    @staticmethod
    async def _half_closed(requests: AsyncIterator[Any]) -> None:
        async for _ in requests:
            pass


class EchoStub:
    """Calls it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        codecs = (health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString)
        self.echo = channel.unary_unary(f"/{NAME}/Echo", *codecs)
        self.flood = channel.stream_stream(f"/{NAME}/Flood")
        self.hold = channel.stream_stream(f"/{NAME}/Hold", *codecs)


def ask(what: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=what)


def main() -> None:
    """As a program: `--model refuse` raises StartError, `--model crash` an unexpected exception."""

    def build(settings: Settings) -> EchoService:
        errors = {"refuse": StartError("teacher.model: refused by the test"), "crash": KeyError("crashed by the test")}
        return EchoService(errors.get(settings.teacher.model))

    run_service("echo", build, "teacher")


if __name__ == "__main__":
    sys.exit(main())
