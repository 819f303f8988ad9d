"""What another service holds to call Generate: a typed client over one channel, and a blocking call for scripts.

It adds nothing to the contract: options go out and messages come back as generation.proto has them. Errors are
``grpc.aio.AioRpcError``, documented there; `violations_of` reads the fields that a refused request got wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import grpc
import grpc.aio
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.errors import details_of
from eagle_pangu.serving.settings import ServerSettings
from protos.v1 import generation_pb2, generation_pb2_grpc


class GenerationClient:
    """Many calls may run at once; they share one connection. Cancel the task, or leave the loop, to abort a call.

    Use it as an async context manager, or call `close`.

    Args:
        target: as gRPC names it: "host:port", "dns:///name:port", ...
        settings: message limits and keepalive of the connection; the defaults of the services when left out.
    """

    def __init__(self, target: str, settings: ServerSettings | None = None) -> None:
        self._channel = channel(target, settings or ServerSettings())
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(
        self, options: generation_pb2.GenerationOptions, *, seconds: float | None = None
    ) -> generation_pb2.GenerateResponse:
        """The whole answer.

        Args:
            options: prompt and wishes; see generation.proto.
            seconds: until the call fails with DEADLINE_EXCEEDED; None: it may take as long as it takes.

        Raises:
            grpc.aio.AioRpcError: any status but OK.
        """
        return await self._stub.Generate(generation_pb2.GenerateRequest(options=options), timeout=seconds)

    async def generate_stream(
        self, options: generation_pb2.GenerationOptions, *, seconds: float | None = None
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        """The same answer as deltas, one a round; arguments and errors as for `generate`."""
        call = self._stub.GenerateStream(generation_pb2.GenerateStreamRequest(options=options), timeout=seconds)
        try:
            async for delta in call:
                yield delta
        finally:
            call.cancel()  # no effect on a call that is over

    async def model_info(self, *, seconds: float | None = None) -> generation_pb2.GetModelInfoResponse:
        """The teacher, the drafters on offer, and the limits."""
        return await self._stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=seconds)

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self.close()


class Violation(NamedTuple):
    """One rule that a request broke. field: as in "options.stop[2]"."""

    field: str
    reason: str


def violations_of(error: grpc.aio.AioRpcError) -> Sequence[Violation]:
    """Everything that a refused request got wrong, from the status details; empty for other errors."""
    status = details_of(error)
    violations: list[Violation] = []
    for packed in status.details if status else ():
        bad_request = error_details_pb2.BadRequest()
        if packed.Unpack(bad_request):
            violations += [Violation(each.field, each.description) for each in bad_request.field_violations]
    return violations


def generate(
    target: str, options: generation_pb2.GenerationOptions, *, seconds: float | None = None
) -> generation_pb2.GenerateResponse:
    """One whole answer, blocking; for scripts without an event loop.

    Raises:
        grpc.aio.AioRpcError: any status but OK.
    """

    async def answer() -> generation_pb2.GenerateResponse:
        async with GenerationClient(target) as client:
            return await client.generate(options, seconds=seconds)

    return asyncio.run(answer())
