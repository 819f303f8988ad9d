"""Plain calls on the worker."""

import asyncio
import contextvars
import threading

import pytest
from structlog.testing import capture_logs

from eagle_pangu.serving.batch_worker import BatchWorker
from eagle_pangu.serving.work_items import WorkerClosedError
from tests.serving.doubler import asks, held, queued


async def test_all_work_runs_on_one_thread_that_is_not_the_event_loops(worker):
    threads = {(await worker.run(session, threading.get_ident)).value for session in range(5)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_sessions_take_turns_and_each_keeps_its_own_order(worker):
    gate, blocked = await held(worker)
    order: list[str] = []
    tasks = [
        await queued(worker, worker.run(name[0], lambda name=name: order.append(name)))
        for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    gate.opened.set()
    await asyncio.gather(blocked, *tasks)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_failing_call_reaches_its_own_caller_and_nobody_else(worker):
    def fail() -> None:
        raise ZeroDivisionError("in a forward pass")

    gate, blocked = await held(worker)
    failing = await queued(worker, worker.run("a", fail))
    sound = await queued(worker, worker.run("b", lambda: 42))
    gate.opened.set()
    with pytest.raises(ZeroDivisionError):
        await failing
    assert (await sound).value == 42
    await blocked


async def test_a_cancelled_caller_takes_its_waiting_call_out_of_the_queue(worker):
    gate, blocked = await held(worker)
    ran: list[str] = []
    doomed = await queued(worker, worker.run("a", lambda: ran.append("a")))
    kept = await queued(worker, worker.run("b", lambda: ran.append("b")))
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert worker.heartbeat().waiting == 1
    gate.opened.set()
    await asyncio.gather(blocked, kept)
    assert ran == ["b"]


async def test_a_caller_cancelled_while_its_call_runs_does_not_stop_the_worker(worker):
    gate, blocked = await held(worker)
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    gate.opened.set()
    assert (await worker.run("b", lambda: 7)).value == 7


async def test_the_heartbeat_tells_busy_from_idle(worker):
    before = worker.heartbeat()
    assert before.busy_since is None
    gate, blocked = await held(worker)
    busy = worker.heartbeat()
    assert busy.busy_since is not None
    assert busy.busy_since >= before.last_finished
    gate.opened.set()
    await blocked
    assert worker.heartbeat().last_finished >= busy.busy_since


async def test_times_are_reported_apart(worker):
    gate, blocked = await held(worker)
    waiting = await queued(worker, worker.run("a", lambda: None))
    gate.opened.set()
    first, second = await asyncio.gather(blocked, waiting)
    assert first.run_us > 0
    assert second.queue_us > 0


async def test_work_sees_the_context_of_its_caller(worker):
    request = contextvars.ContextVar("request", default="none")

    def job():
        before = request.get()
        yield 1
        return before, request.get()

    async def ask(name: str) -> str:
        request.set(name)
        assert (await worker.run(name, request.get)).value == name
        return (await worker.step(name, job)).value

    assert await asyncio.gather(ask("a"), ask("b")) == [("a", "a"), ("b", "b")]


async def test_closing_fails_what_waits_and_what_comes_later(batcher):
    worker = BatchWorker("model", batcher)
    gate, blocked = await held(worker)
    waiting = await queued(worker, worker.run("a", lambda: None))
    closing = asyncio.create_task(worker.close())
    with pytest.raises(WorkerClosedError):
        await waiting
    gate.opened.set()
    await asyncio.gather(blocked, closing)
    with pytest.raises(WorkerClosedError):
        await worker.run("b", lambda: None)
    with pytest.raises(WorkerClosedError):
        await worker.step("b", asks(1))
    await worker.close()


async def test_work_that_nobody_waits_for_runs_after_what_its_session_handed_in_before(worker):
    gate, held_task = await held(worker)
    order = []
    before = await queued(worker, worker.run("a", lambda: order.append("awaited")))
    worker.submit("a", lambda: order.append("submitted"))
    later = await queued(worker, worker.run("b", lambda: order.append("another session")))
    gate.opened.set()
    await asyncio.gather(held_task, before, later, worker.run("a", lambda: None))
    assert order == ["awaited", "another session", "submitted"]


async def test_work_that_nobody_waits_for_is_logged_when_it_fails_and_the_worker_goes_on(worker):
    ended = asyncio.Event()
    with capture_logs() as lines:
        worker.submit("a", lambda: 1 // 0, ended.set)
        assert (await worker.run("a", lambda: 7)).value == 7
        await ended.wait()
    [line] = lines
    assert line["log_level"] == "error"
    assert isinstance(line["exc_info"], ZeroDivisionError)


async def test_work_that_nobody_waits_for_is_dropped_without_a_word_when_the_worker_closes(batcher):
    worker = BatchWorker("model", batcher)
    gate, held_task = await held(worker)
    done, told = [], []
    with capture_logs() as lines:
        worker.submit("a", lambda: done.append("waited"), lambda: told.append("waited"))
        closing = asyncio.create_task(worker.close())
        await asyncio.sleep(0)
        worker.submit("a", lambda: done.append("came late"), lambda: told.append("came late"))
        gate.opened.set()
        await asyncio.gather(held_task, closing)
    assert (done, lines, worker.heartbeat().waiting) == ([], [], 0)
    assert told == ["waited", "came late"]
