"""The thread that a drafter works on."""

from __future__ import annotations

import asyncio
import contextvars
import threading

from draft_service.executor import Worker
from draft_service.main import DraftService
from draft_service.service import Desk
from eagle_pangu.serving.settings import DraftSettings
from tests.draft_service.fakes import ScriptedDrafter


async def test_work_sees_the_context_of_its_caller() -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    worker = Worker("test")

    async def ask(name: str) -> str:
        request.set(name)
        return await worker.run(request.get)

    assert await asyncio.gather(ask("a"), ask("b")) == ["a", "b"]
    await worker.close()


async def test_a_drafter_that_hangs_is_told_as_a_hindrance_until_it_comes_back() -> None:
    service, worker = DraftService(DraftSettings(stall_seconds=0.01)), Worker("test")
    service._desks["scripted"] = Desk(ScriptedDrafter(), worker)
    assert service.hindrance() is None
    began, go_on = threading.Event(), threading.Event()
    work = asyncio.create_task(worker.run(lambda: (began.set(), go_on.wait(20))))
    await asyncio.to_thread(began.wait, 20)
    while service.hindrance() is None:  # noqa: ASYNC110 -- time itself is what is waited for
        await asyncio.sleep(0.01)
    go_on.set()
    await work
    assert service.hindrance() is None
    await worker.close()
