"""When the requests of a load are sent: by clients in a closed loop, or at random times of a Poisson process.

It knows nothing of what a request is: it starts pieces of work, and hands back what they return.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")

Work = Callable[[float], Awaitable[T]]
"""Started with its arrival on `time.perf_counter`: what it measures counts from there, a wait for room included."""


@dataclass(frozen=True)
class Load:
    """How requests come.

    concurrency: most open at once. Without `arrival_rate` so many clients send one request after another; None: no
    bound, and a rate is needed. arrival_rate: requests a second, at random times. seed: of these times.
    """

    concurrency: int | None
    arrival_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is None and self.arrival_rate is None:
            raise ValueError("load: expected a concurrency, an arrival rate, or both")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1, got {self.concurrency}")
        if self.arrival_rate is not None and not 0 < self.arrival_rate < float("inf"):
            raise ValueError(f"arrival_rate: expected requests a second above 0, got {self.arrival_rate}")


async def under_load(works: Iterable[Work[T]], load: Load) -> list[T]:
    """Do all of it under that load; the values in the order of `works`, which is read as the load goes on.

    Raises:
        Exception: the first that a piece of work raises; the others are cancelled.
    """
    try:
        if load.arrival_rate is None:
            return await _closed_loop(works, load.concurrency or 1)
        return await _open_loop(works, load.concurrency, arrival_times(load.arrival_rate, load.seed))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start, ascending, without end: a Poisson process of `rate` arrivals a second."""
    random, now = np.random.default_rng(seed), 0.0
    while True:
        now += float(random.exponential(1 / rate))
        yield now


async def _closed_loop(works: Iterable[Work[T]], clients: int) -> list[T]:
    values: dict[int, T] = {}
    waiting = iter(enumerate(works))  # shared: whoever is free takes the next

    async def client() -> None:
        for place, work in waiting:
            values[place] = await work(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return [values[place] for place in sorted(values)]


async def _open_loop(works: Iterable[Work[T]], open_at_most: int | None, times: Iterator[float]) -> list[T]:
    room = asyncio.Semaphore(open_at_most) if open_at_most is not None else None
    started = time.perf_counter()
    tasks: list[asyncio.Task[T]] = []

    async def one(work: Work[T], arrived: float) -> T:
        try:
            return await work(arrived)
        finally:
            if room is not None:
                room.release()

    async with asyncio.TaskGroup() as group:
        for work, due in zip(works, times, strict=False):
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            if room is not None:
                await room.acquire()  # those behind it come late, not never: their times stay what they were
            tasks.append(group.create_task(one(work, started + due)))
    return [task.result() for task in tasks]
