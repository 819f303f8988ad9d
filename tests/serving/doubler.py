"""A batcher with answers that anybody knows, jobs that ask it, and ways to hold its worker."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from eagle_pangu.serving.batch_worker import BatchWorker, Chosen, Plan, Waiting


class Gate:
    """Work that holds the worker until opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(10)


class Doubler:
    """All that wait, in one pass: an answer is twice the request. Negative requests fail any pass they are in."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.gate: Callable[[], None] = lambda: None
        self.choose: Callable[[Sequence[Waiting[int]]], Sequence[Waiting[int]]] = lambda waiting: waiting
        self.patience: Callable[[Sequence[Waiting[int]]], float] = lambda waiting: 0

    def plan(self, waiting: Sequence[Waiting[int]], now: float) -> Plan[int]:
        assert waiting
        assert all(each.since <= now for each in waiting)
        chosen = [Chosen(each, each.request) for each in self.choose(waiting)]
        return Plan(chosen, self.patience(waiting))

    def compute(self, chosen: Sequence[Chosen[int]]) -> Sequence[int]:
        requests = [each.request for each in chosen]
        self.passes.append(requests)
        self.gate()
        if min(requests) < 0:
            raise ZeroDivisionError("in a forward pass")
        return [2 * request for request in requests]


def asks(*requests: int):
    """A job that asks one after the other, and returns the answers."""

    def job():
        answers = []
        for request in requests:
            answers.append((yield request))  # noqa: PERF401 -- a comprehension cannot yield
        return answers

    return job


async def held(worker: BatchWorker) -> tuple[Gate, asyncio.Task]:
    gate = Gate()
    task = asyncio.create_task(worker.run("gate", gate))
    await asyncio.to_thread(gate.entered.wait, 10)
    return gate, task


async def queued(worker: BatchWorker, coroutine) -> asyncio.Task:
    before = worker.heartbeat().waiting
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    assert worker.heartbeat().waiting == before + 1
    return task


async def in_pass(worker: BatchWorker, batcher: Doubler, session: str, job) -> tuple[Gate, asyncio.Task]:
    """A job whose pass is held."""
    gate = batcher.gate = Gate()
    task = asyncio.create_task(worker.step(session, job))
    await asyncio.to_thread(gate.entered.wait, 10)
    batcher.gate = lambda: None
    return gate, task
