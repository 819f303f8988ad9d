"""A server that follows a script, and one face for both clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from eagle_pangu.client.client import GenerationClient, SyncGenerationClient
from eagle_pangu.serving.errors import DETAILS_KEY, ResourceExhaustedError, status_of
from protos.v1 import generation_pb2, generation_pb2_grpc

Delta = generation_pb2.GenerateStreamResponse


@dataclass
class Attempt:
    """What the server does with one call: these messages, then this end. code: None is OK."""

    messages: Sequence[Any] = ()
    code: grpc.StatusCode | None = None
    retry_after: float | None = None
    details: bytes | None = None

    def end(self, context: grpc.ServicerContext) -> None:
        if self.code is None:
            return
        if self.retry_after is not None:
            self.details = status_of(ResourceExhaustedError("full", self.retry_after)).SerializeToString()
        if self.details is not None:
            context.set_trailing_metadata(((DETAILS_KEY, self.details),))
        context.abort(self.code, f"scripted {self.code.name}")


@dataclass
class ScriptedServer(generation_pb2_grpc.GenerationServiceServicer):
    """Plays one attempt a call; `asked` are the requests, `limits` the seconds that each call was given."""

    script: list[Attempt] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    limits: list[float | None] = field(default_factory=list)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    on_call: Callable[[], None] = lambda: None
    target: str = ""

    def plays(self, *script: Attempt) -> None:
        """A new script; forgets what was asked."""
        self.script, self.asked, self.limits = list(script), [], []

    def _next(self, request: Any, context: grpc.ServicerContext) -> Attempt:
        context.add_callback(self.ended.release)
        self.asked.append(request)
        self.limits.append(context.time_remaining())
        self.on_call()
        return self.script.pop(0)

    def Generate(self, request, context):  # noqa: N802
        attempt = self._next(request, context)
        attempt.end(context)
        return attempt.messages[0]

    def GenerateStream(self, request, context):  # noqa: N802
        attempt = self._next(request, context)
        yield from attempt.messages
        attempt.end(context)

    def GetModelInfo(self, request, context):  # noqa: N802
        attempt = self._next(request, context)
        attempt.end(context)
        return attempt.messages[0]


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    """On a socket of the loopback."""
    servicer, server = ScriptedServer(), grpc.server(ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(None).wait()


@dataclass
class FakeTime:
    """Stands still but for the waits between attempts, which take no time and are noted."""

    now: float = 1000.0
    waits: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


class Face:
    """Both clients alike: a call on one connection, waits without time; what came before an error is in `got`."""

    def __init__(self, kind: str, target: str) -> None:
        self.kind, self.target = kind, target
        self.time = FakeTime()
        self.got: list[Delta] = []

    def generate(self, *args: Any, retries: Any = None, **kwargs: Any) -> generation_pb2.GenerateResponse:
        return self._call("generate", retries, *args, **kwargs)

    def model_info(self, *, retries: Any = None, **kwargs: Any) -> generation_pb2.GetModelInfoResponse:
        return self._call("model_info", retries, **kwargs)

    def stream(self, *args: Any, retries: Any = None, **kwargs: Any) -> list[Delta]:
        self.got = []
        if self.kind == "sync":
            with self._sync(retries) as client:
                for delta in client.generate_stream(*args, **kwargs):
                    self.got.append(delta)
            return self.got

        async def collect() -> None:
            async with self._async(retries) as client:
                async for delta in client.generate_stream(*args, **kwargs):
                    self.got.append(delta)

        asyncio.run(collect())
        return self.got

    def _call(self, name: str, retries: Any, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "sync":
            with self._sync(retries) as client:
                return getattr(client, name)(*args, **kwargs)

        async def call() -> Any:
            async with self._async(retries) as client:
                return await getattr(client, name)(*args, **kwargs)

        return asyncio.run(call())

    def _sync(self, retries: Any) -> SyncGenerationClient:
        return SyncGenerationClient(self.target, retries=retries, clock=self.time.clock, sleep=self.time.sleep)

    def _async(self, retries: Any) -> GenerationClient:
        return GenerationClient(self.target, retries=retries, clock=self.time.clock, sleep=self.time.sleep_async)


@pytest.fixture(params=["async", "sync"])
def client(request: pytest.FixtureRequest, scripted: ScriptedServer) -> Face:
    """Each of the two clients, at the scripted server."""
    return Face(request.param, scripted.target)
