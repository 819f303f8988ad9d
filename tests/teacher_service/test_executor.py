import asyncio
import contextvars
import threading

import pytest
from structlog.testing import capture_logs

from teacher_service.executor import Executor, ExecutorClosedError


@pytest.fixture
async def executor():
    executor = Executor()
    yield executor
    await executor.close()


class Gate:
    """Work that holds the worker until opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(10)


async def held(executor: Executor) -> tuple[Gate, asyncio.Task]:
    gate = Gate()
    task = asyncio.create_task(executor.run("gate", gate))
    await asyncio.to_thread(gate.entered.wait, 10)
    return gate, task


async def queued(executor: Executor, session: str, work) -> asyncio.Task:
    before = executor.heartbeat().waiting
    task = asyncio.create_task(executor.run(session, work))
    await asyncio.sleep(0)
    assert executor.heartbeat().waiting == before + 1
    return task


async def test_all_work_runs_on_one_thread_that_is_not_the_event_loops(executor):
    threads = {(await executor.run(session, threading.get_ident)).value for session in range(5)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_sessions_take_turns_and_each_keeps_its_own_order(executor):
    gate, blocked = await held(executor)
    order: list[str] = []
    tasks = [
        await queued(executor, name[0], lambda name=name: order.append(name))
        for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    gate.opened.set()
    await asyncio.gather(blocked, *tasks)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_failing_item_reaches_its_own_caller_and_nobody_else(executor):
    def fail() -> None:
        raise ZeroDivisionError("in a forward pass")

    gate, blocked = await held(executor)
    failing = await queued(executor, "a", fail)
    sound = await queued(executor, "b", lambda: 42)
    gate.opened.set()
    with pytest.raises(ZeroDivisionError):
        await failing
    assert (await sound).value == 42
    await blocked


async def test_a_cancelled_caller_takes_its_waiting_item_out_of_the_queue(executor):
    gate, blocked = await held(executor)
    ran: list[str] = []
    doomed = await queued(executor, "a", lambda: ran.append("a"))
    kept = await queued(executor, "b", lambda: ran.append("b"))
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert executor.heartbeat().waiting == 1
    gate.opened.set()
    await asyncio.gather(blocked, kept)
    assert ran == ["b"]


async def test_a_caller_cancelled_while_its_item_runs_does_not_stop_the_worker(executor):
    gate, blocked = await held(executor)
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    gate.opened.set()
    assert (await executor.run("b", lambda: 7)).value == 7


async def test_the_heartbeat_tells_busy_from_idle(executor):
    before = executor.heartbeat()
    assert before.busy_since is None
    gate, blocked = await held(executor)
    busy = executor.heartbeat()
    assert busy.busy_since is not None
    assert busy.busy_since >= before.last_finished
    gate.opened.set()
    await blocked
    await executor.run("b", lambda: None)
    assert executor.heartbeat().last_finished >= busy.busy_since


async def test_times_are_reported_apart(executor):
    gate, blocked = await held(executor)
    waiting = await queued(executor, "a", lambda: None)
    gate.opened.set()
    first, second = await asyncio.gather(blocked, waiting)
    assert first.run_us > 0
    assert second.queue_us >= first.run_us - first.queue_us - 1_000_000  # it waited behind the first
    assert second.queue_us > 0


async def test_work_sees_the_context_of_its_caller(executor):
    request = contextvars.ContextVar("request", default="none")

    async def ask(name: str) -> str:
        request.set(name)
        return (await executor.run(name, request.get)).value

    assert await asyncio.gather(ask("a"), ask("b")) == ["a", "b"]


async def test_closing_fails_what_waits_and_what_comes_later():
    executor = Executor()
    gate, blocked = await held(executor)
    waiting = await queued(executor, "a", lambda: None)
    closing = asyncio.create_task(executor.close())
    with pytest.raises(ExecutorClosedError):
        await waiting
    gate.opened.set()
    await asyncio.gather(blocked, closing)
    with pytest.raises(ExecutorClosedError):
        await executor.run("b", lambda: None)
    await executor.close()


async def test_work_that_nobody_waits_for_runs_after_what_its_session_handed_in_before(executor):
    gate, held_task = await held(executor)
    order = []
    before = await queued(executor, "a", lambda: order.append("awaited"))
    executor.submit("a", lambda: order.append("submitted"))
    later = await queued(executor, "b", lambda: order.append("another session"))
    gate.opened.set()
    await asyncio.gather(held_task, before, later, executor.run("a", lambda: None))
    assert order == ["awaited", "another session", "submitted"]


async def test_work_that_nobody_waits_for_is_logged_when_it_fails_and_the_executor_goes_on(executor):
    with capture_logs() as lines:
        executor.submit("a", lambda: 1 // 0)
        assert (await executor.run("a", lambda: 7)).value == 7
    [line] = lines
    assert line["log_level"] == "error"
    assert isinstance(line["exc_info"], ZeroDivisionError)


async def test_work_that_nobody_waits_for_is_dropped_without_a_word_when_the_executor_closes():
    executor = Executor()
    gate, held_task = await held(executor)
    done = []
    with capture_logs() as lines:
        executor.submit("a", lambda: done.append("waited"))
        closing = asyncio.create_task(executor.close())
        await asyncio.sleep(0)
        executor.submit("a", lambda: done.append("came late"))
        gate.opened.set()
        await asyncio.gather(held_task, closing)
    assert (done, lines, executor.heartbeat().waiting) == ([], [], 0)
