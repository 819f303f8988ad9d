"""Work that an event may cut short. Knows neither services nor calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


async def finished_before(work: Coroutine[object, object, None], event: asyncio.Event) -> bool:
    """Run `work` to its end (True) or, when the event comes first, cancel it (False)."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, waiter):
            each.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)
