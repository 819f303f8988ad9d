"""Admission: who may hold one of the teacher's slots, and who waits for one.

A bounded queue, by priority and then by arrival, in front of a fixed number of slots. It counts; the KV itself is the
engine's, and what a session does with its slot is not known here. For one event loop.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from eagle_pangu.serving.errors import ResourceExhaustedError, UnavailableError

RETRY_SECONDS = 1.0  # what a refused opener is told to wait; about the time of a short answer


class _Waiter(NamedTuple):
    priority: int
    granted: asyncio.Future[None]


class Slots:
    """Hands out slots, to the highest priority first, and in order of arrival among equals. Nobody who holds one is
    interrupted, and a full queue refuses whoever comes.

    Args:
        total: slots in all.
        queue_limit: openers that may wait at once.
        queue_seconds: longest wait of one of them, in seconds.
    """

    def __init__(self, total: int, queue_limit: int, queue_seconds: float) -> None:
        self.total = total
        self.in_use = 0
        self._queue_limit = queue_limit
        self._queue_seconds = queue_seconds
        self._waiters: list[_Waiter] = []  # who comes next, first
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return self.total - self.in_use

    @property
    def waiting(self) -> int:
        """Openers in the queue."""
        return len(self._waiters)

    @asynccontextmanager
    async def hold(self, priority: int = 0) -> AsyncIterator[None]:
        """One slot for the length of the block, however the block ends.

        Args:
            priority: while all slots are in use, higher ones come first.

        Raises:
            ResourceExhaustedError: the queue is full, or no slot came free in time.
            UnavailableError: closed, before or during the wait.
        """
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    def close(self) -> None:
        """Refuse new openers and those that wait; holders go on."""
        self._closed = True
        for waiter in self._waiters:
            if not waiter.granted.done():
                waiter.granted.set_exception(UnavailableError("the teacher is draining"))
        self._waiters.clear()

    async def idle(self) -> None:
        """Return once no slot is in use."""
        await self._idle.wait()

    async def _acquire(self, priority: int) -> None:
        if self._closed:
            raise UnavailableError("the teacher is draining")
        if self.in_use < self.total:  # then nobody waits: a freed slot goes to the queue first
            self.in_use += 1
            self._idle.clear()
            return
        if len(self._waiters) >= self._queue_limit:
            raise ResourceExhaustedError(
                f"all {self.total} slots are in use and {len(self._waiters)} sessions wait, the limit", RETRY_SECONDS
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(priority, granted)
        insort(self._waiters, waiter, key=lambda each: -each.priority)  # behind its equals
        try:
            async with asyncio.timeout(self._queue_seconds):
                await granted
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release()  # granted in the same moment as the wait ended
            if isinstance(error, TimeoutError):
                raise ResourceExhaustedError(
                    f"none of {self.total} slots came free within {self._queue_seconds:g} s", RETRY_SECONDS
                ) from None
            raise

    def _release(self) -> None:
        while self._waiters:
            granted = self._waiters.pop(0).granted
            if not granted.done():
                granted.set_result(None)  # the slot changes hands, in_use stays
                return
        self.in_use -= 1
        if self.in_use == 0:
            self._idle.set()
