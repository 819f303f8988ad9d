"""What another service holds to call Generate: a typed client over one channel, and its blocking twin.

They add nothing to the contract but retries: options go out and messages come back as generation.proto has them. Errors
are documented there; `violations_of` reads the fields that a refused request got wrong. When a call is made again is
`retries`' matter, and how a broken stream goes on without a repetition is `resumption`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import grpc
import grpc.aio
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from eagle_pangu.client.resumption import Delivery, repeatable
from eagle_pangu.client.retries import RETRIED, Attempts, RetryPolicy
from eagle_pangu.serving.channels import blocking_channel, channel
from eagle_pangu.serving.errors import details_of
from eagle_pangu.serving.settings import ServerSettings
from protos.v1 import generation_pb2, generation_pb2_grpc

Answer = TypeVar("Answer")


class GenerationClient:
    """Many calls may run at once; they share one connection. Cancel the task, or close the stream, to abort a call.

    Use it as an async context manager, or call `close`.

    Args:
        target: as gRPC names it: "host:port", "dns:///name:port", ...
        settings: message limits and keepalive of the connection; the defaults of the services when left out.
        retries: when UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED are tried again; `RetryPolicy(attempts=1)`: never.
        clock: monotonic seconds.
        sleep: waits for so many seconds between attempts.
    """

    def __init__(
        self,
        target: str,
        settings: ServerSettings | None = None,
        *,
        retries: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._channel = channel(target, settings or ServerSettings())
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._retries = retries or RetryPolicy()
        self._clock = clock
        self._sleep = sleep

    async def generate(
        self, options: generation_pb2.GenerationOptions, *, seconds: float | None = None
    ) -> generation_pb2.GenerateResponse:
        """The whole answer.

        Args:
            options: prompt and wishes; see generation.proto.
            seconds: until the call fails with DEADLINE_EXCEEDED, all attempts together; None: it may take as long as it
                takes. Where the wait for the next attempt would last longer, the last one's error comes at once.

        Raises:
            grpc.aio.AioRpcError: any status but OK, of the last attempt.
        """
        request = generation_pb2.GenerateRequest(options=options)
        return await self._ask(lambda left: self._stub.Generate(request, timeout=left), seconds)

    async def generate_stream(
        self, options: generation_pb2.GenerationOptions, *, seconds: float | None = None
    ) -> AsyncGenerator[generation_pb2.GenerateStreamResponse, None]:
        """The same answer as deltas, one a round; arguments and errors as for `generate`.

        A stream that breaks goes on where it broke: everything is delivered once. For that a request that samples and
        names no seed is given one here. `request_id` and `speculation` are those of the attempt that a delta came from.

        Raises:
            DivergedError: the repetition differs from what was delivered.
        """
        request, attempts, delivery = repeatable(options), self._attempts(seconds), Delivery()
        while True:
            call = self._stub.GenerateStream(request, timeout=attempts.seconds_left())
            delivery.begin_attempt()
            try:
                async for message in call:
                    if (news := delivery.news_of(message)) is not None:
                        yield news
                delivery.end_attempt()
                return
            except grpc.aio.AioRpcError as error:
                if delivery.complete and error.code() in RETRIED:
                    return
                pause = attempts.pause_after(error)
            finally:
                call.cancel()  # no effect on a call that is over
            await self._sleep(pause)

    async def model_info(self, *, seconds: float | None = None) -> generation_pb2.GetModelInfoResponse:
        """The teacher, the drafters on offer, and the limits; `seconds` and errors as for `generate`."""
        request = generation_pb2.GetModelInfoRequest()
        return await self._ask(lambda left: self._stub.GetModelInfo(request, timeout=left), seconds)

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    def _attempts(self, seconds: float | None) -> Attempts:
        return Attempts(self._retries, seconds, self._clock)

    async def _ask(self, call: Callable[[float | None], Awaitable[Answer]], seconds: float | None) -> Answer:
        attempts = self._attempts(seconds)
        while True:
            try:
                return await call(attempts.seconds_left())
            except grpc.aio.AioRpcError as error:
                pause = attempts.pause_after(error)
            await self._sleep(pause)

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self.close()


class SyncGenerationClient:
    """`GenerationClient` without an event loop: the same calls, blocking. Threads may share one.

    Use it as a context manager, or call `close`. Arguments as for `GenerationClient`; errors are ``grpc.RpcError``.
    """

    def __init__(
        self,
        target: str,
        settings: ServerSettings | None = None,
        *,
        retries: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._channel = blocking_channel(target, settings or ServerSettings())
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._retries = retries or RetryPolicy()
        self._clock = clock
        self._sleep = sleep

    def generate(
        self, options: generation_pb2.GenerationOptions, *, seconds: float | None = None
    ) -> generation_pb2.GenerateResponse:
        """The whole answer; see `GenerationClient.generate`."""
        request = generation_pb2.GenerateRequest(options=options)
        return self._ask(lambda left: self._stub.Generate(request, timeout=left), seconds)

    def generate_stream(
        self, options: generation_pb2.GenerationOptions, *, seconds: float | None = None
    ) -> Generator[generation_pb2.GenerateStreamResponse, None, None]:
        """The same answer as deltas; see `GenerationClient.generate_stream`. Leave the loop, or close it, to abort."""
        request, attempts, delivery = repeatable(options), self._attempts(seconds), Delivery()
        while True:
            call = self._stub.GenerateStream(request, timeout=attempts.seconds_left())
            delivery.begin_attempt()
            try:
                for message in call:
                    if (news := delivery.news_of(message)) is not None:
                        yield news
                delivery.end_attempt()
                return
            except grpc.RpcError as error:
                if delivery.complete and error.code() in RETRIED:
                    return
                pause = attempts.pause_after(error)
            finally:
                call.cancel()
            self._sleep(pause)

    def model_info(self, *, seconds: float | None = None) -> generation_pb2.GetModelInfoResponse:
        """The teacher, the drafters on offer, and the limits."""
        request = generation_pb2.GetModelInfoRequest()
        return self._ask(lambda left: self._stub.GetModelInfo(request, timeout=left), seconds)

    def close(self) -> None:
        """Close the connection; running calls, of other threads too, are cancelled."""
        self._channel.close()

    def _attempts(self, seconds: float | None) -> Attempts:
        return Attempts(self._retries, seconds, self._clock)

    def _ask(self, call: Callable[[float | None], Answer], seconds: float | None) -> Answer:
        attempts = self._attempts(seconds)
        while True:
            try:
                return call(attempts.seconds_left())
            except grpc.RpcError as error:
                pause = attempts.pause_after(error)
            self._sleep(pause)

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()


class Violation(NamedTuple):
    """One rule that a request broke. field: as in "options.stop[2]"."""

    field: str
    reason: str


def violations_of(error: grpc.RpcError) -> Sequence[Violation]:
    """Everything that a refused request got wrong, from the status details; empty for other errors."""
    status = details_of(error)
    violations: list[Violation] = []
    for packed in status.details if status else ():
        bad_request = error_details_pb2.BadRequest()
        if packed.Unpack(bad_request):
            violations += [Violation(each.field, each.description) for each in bad_request.field_violations]
    return violations
