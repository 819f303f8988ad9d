"""The HTTP front on a real socket, over a fake orchestrator in the same process, and the official client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2
import openai
import pytest

from eagle_pangu.openai_api.main import listen, server
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.settings import HttpSettings
from tests.openai_api.fake_generation import FakeGeneration, FakeOrchestrator


@contextlib.asynccontextmanager
async def front(target: str, **settings: object) -> AsyncIterator[str]:
    """The HTTP front before an orchestrator; yields its URL."""
    chosen = HttpSettings.model_validate({"target": target, "port": 0, "drain_seconds": 1, **settings})
    listener = listen(chosen)
    port = listener.getsockname()[1]
    async with server(chosen) as serving:
        task = asyncio.create_task(serving.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            serving.should_exit = True
            await task


async def healthy(url: str) -> None:
    """Return once the front has a connection to its orchestrator: where the machine is busy the first try may fail."""
    async with asyncio.timeout(20), httpx2.AsyncClient() as client:
        while (await client.get(f"{url}/health")).status_code != 200:
            pass


@dataclass
class Stack:
    """What a test holds in its hands."""

    fake: FakeGeneration
    url: str
    client: openai.AsyncOpenAI


@contextlib.asynccontextmanager
async def fake_stack(**settings: object) -> AsyncIterator[Stack]:
    """A fake orchestrator, the front with these settings, connected, and a client; neither of the two asks twice."""
    fake, settings = FakeGeneration(), {"attempts": 1, **settings}
    async with (
        running(FakeOrchestrator(fake)) as port,
        front(f"127.0.0.1:{port}", **settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await healthy(url)
        yield Stack(fake, url, client)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """The usual one."""
    async with fake_stack() as made:
        yield made
