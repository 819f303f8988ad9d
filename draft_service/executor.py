"""A worker thread for what blocks: model work and search stay off the event loop.

One thread a drafter, so that a drafter's sessions are touched by one thread only, and one drafter's forward pass never
delays another's look-up. Work runs in the order it was handed in; it knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """One thread, first in first out.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.busy_since: float | None = None
        """Start of the work that runs now, in seconds of `time.monotonic`; None when none does."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Hand in work without waiting: it runs after everything handed in before, and logs the caller's ids."""
        return self._pool.submit(contextvars.copy_context().run, self._timed, work)

    def _timed(self, work: Callable[[], T]) -> T:
        self.busy_since = time.monotonic()
        try:
            return work()
        finally:
            self.busy_since = None

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Cancelled while it runs, it goes on to its end and its result is dropped."""
        return await asyncio.wrap_future(self.submit(work))

    async def close(self) -> None:
        """Return once all work is done and the thread has ended."""
        await asyncio.to_thread(self._pool.shutdown)
