"""Admission: who may hold one of the teacher's slots and KV for its tokens, and who waits for them.

A bounded queue, by priority and then by arrival, in front of a fixed number of slots and a fixed number of tokens. It
counts; the KV itself is the engine's, and what a session does with its slot is not known here. For one event loop.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from typing import NamedTuple

from eagle_pangu.serving.errors import ResourceExhaustedError, UnavailableError

RETRY_SECONDS = 1.0  # what a refused opener is told to wait; about the time of a short answer


class Lease:
    """A slot and tokens that somebody holds until they are given back."""

    def __init__(self, slots: Slots, tokens: int) -> None:
        self._slots = slots
        self._tokens = tokens

    def give_back(self) -> None:
        """Once, on the event loop."""
        self._slots.take_back(self._tokens)


class _Waiter(NamedTuple):
    priority: int
    tokens: int
    granted: asyncio.Future[None]


class Slots:
    """Hands out slots, to the highest priority first, and in order of arrival among equals. Nobody who holds one is
    interrupted, nobody who waits for many tokens is overtaken by one who needs fewer, and a full queue refuses whoever
    comes.

    Args:
        total: slots in all.
        kv_tokens: tokens of KV for all of them together.
        queue_limit: openers that may wait at once.
        queue_seconds: longest wait of one of them, in seconds.
    """

    def __init__(self, total: int, kv_tokens: int, queue_limit: int, queue_seconds: float) -> None:
        self.total = total
        self.kv_tokens = kv_tokens
        self.in_use = 0
        self.tokens_in_use = 0
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
    def free_tokens(self) -> int:
        """Tokens of KV that nobody holds."""
        return self.kv_tokens - self.tokens_in_use

    @property
    def waiting(self) -> int:
        """Openers in the queue."""
        return len(self._waiters)

    async def take(self, tokens: int, priority: int = 0) -> Lease:
        """One slot, with KV for `tokens`; the caller gives it back.

        Args:
            tokens: <= `kv_tokens`.
            priority: while there is too little for all, higher ones come first.

        Raises:
            ResourceExhaustedError: the queue is full, or what it takes did not come free in time.
            UnavailableError: closed, before or during the wait.
        """
        assert tokens <= self.kv_tokens
        if self._closed:
            raise UnavailableError("the teacher is draining")
        waiter = _Waiter(priority, tokens, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=lambda each: -each.priority)  # behind its equals
        self._serve()
        if not waiter.granted.done():
            if len(self._waiters) > self._queue_limit:
                self._waiters.remove(waiter)
                raise ResourceExhaustedError(
                    f"{self._in_use()} are in use and {len(self._waiters)} sessions wait, the limit", RETRY_SECONDS
                )
            await self._wait(waiter)
        return Lease(self, tokens)

    def take_back(self, tokens: int) -> None:
        """See `Lease.give_back`."""
        self.in_use -= 1
        self.tokens_in_use -= tokens
        self._serve()
        if self.in_use == 0:
            self._idle.set()

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

    async def _wait(self, waiter: _Waiter) -> None:
        try:
            async with asyncio.timeout(self._queue_seconds):
                await waiter.granted
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._serve()  # it may have stood in the way of those behind it
            elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.take_back(waiter.tokens)  # granted in the same moment as the wait ended
            if isinstance(error, TimeoutError):
                raise ResourceExhaustedError(
                    f"a slot with {waiter.tokens} tokens of KV did not come free within {self._queue_seconds:g} s; "
                    f"{self._in_use()} are in use",
                    RETRY_SECONDS,
                ) from None
            raise

    def _serve(self) -> None:
        """Grant what there is, from the head of the queue on, up to the first one that there is too little for."""
        while self._waiters and self.free > 0 and self._waiters[0].tokens <= self.free_tokens:
            waiter = self._waiters.pop(0)
            if not waiter.granted.done():  # else it is on its way out
                self.in_use += 1
                self.tokens_in_use += waiter.tokens
                self._idle.clear()
                waiter.granted.set_result(None)

    def _in_use(self) -> str:
        tokens = f"{self.tokens_in_use} of {self.kv_tokens} tokens of KV"
        return f"{self.in_use} of {self.total} slots (teacher.slots) and {tokens} (teacher.kv_tokens)"
