"""The thread that a drafter works on."""

from __future__ import annotations

import asyncio
import contextvars

from draft_service.executor import Worker


async def test_work_sees_the_context_of_its_caller() -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    worker = Worker("test")

    async def ask(name: str) -> str:
        request.set(name)
        return await worker.run(request.get)

    assert await asyncio.gather(ask("a"), ask("b")) == ["a", "b"]
    await worker.close()
