"""Jobs on the worker: who shares a pass with whom, and what becomes of those that fail or are given up."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from eagle_pangu.serving.batch_worker import BatchWorker, Chosen, Plan, Waiting
from eagle_pangu.serving.work_items import WorkerClosedError, WorkItem
from tests.serving.doubler import Doubler, Gate, asks, held, in_pass, queued


async def test_a_job_is_sent_what_each_of_its_passes_gave(worker, batcher):
    assert (await worker.step("a", asks(1, 2, 3))).value == [2, 4, 6]
    assert batcher.passes == [[1], [2], [3]]


async def test_a_job_that_asks_for_nothing_needs_no_pass(worker, batcher):
    assert (await worker.step("a", asks())).value == []
    assert batcher.passes == []


async def test_sessions_that_wait_share_a_pass_and_one_that_comes_joins_the_next(worker, batcher):
    gate, blocked = await held(worker)
    first = await queued(worker, worker.step("a", asks(1, 2)))
    second = await queued(worker, worker.step("b", asks(10, 20, 30)))
    gate.opened.set()
    await asyncio.gather(blocked, first, second)
    assert batcher.passes == [[1, 10], [2, 20], [30]]
    gate, first = await in_pass(worker, batcher, "a", asks(1, 2))
    second = await queued(worker, worker.step("b", asks(10, 20)))
    gate.opened.set()
    assert [each.value for each in await asyncio.gather(first, second)] == [[2, 4], [20, 40]]
    assert batcher.passes[3] == [1]
    assert batcher.passes[4] == [10, 2]  # it waits since it was handed in, the other one since its last pass
    assert batcher.passes[5] == [20]


async def test_two_jobs_of_one_session_run_one_after_the_other(worker, batcher):
    gate, blocked = await held(worker)
    first = await queued(worker, worker.step("a", asks(1, 2)))
    second = await queued(worker, worker.step("a", asks(3)))
    gate.opened.set()
    await asyncio.gather(blocked, first, second)
    assert batcher.passes == [[1], [2], [3]]


async def test_what_waits_is_shown_in_order_of_arrival_and_what_is_left_out_waits_on(worker, batcher):
    shown = []
    batcher.choose = lambda waiting: shown.append([each.request for each in waiting]) or waiting[:2]
    gate, blocked = await held(worker)
    tasks = [
        await queued(worker, worker.step(name, asks(*requests)))
        for name, requests in {"a": (1, 2), "b": (11,), "c": (21,)}.items()
    ]
    gate.opened.set()
    await asyncio.gather(blocked, *tasks)
    assert shown == [[1, 11, 21], [21, 2]]


async def test_a_request_may_be_computed_in_part(worker, batcher):
    batcher.plan = lambda waiting, now: Plan([Chosen(each, each.request - 1) for each in waiting])
    assert (await worker.step("a", asks(5))).value == [8]


async def test_a_request_that_fails_the_pass_hurts_its_own_session_alone(worker, batcher):
    gate, blocked = await held(worker)
    sound = [await queued(worker, worker.step("a", asks(1, 2)))]
    failing = await queued(worker, worker.step("b", asks(-1, 2)))
    sound.append(await queued(worker, worker.step("c", asks(3, 4))))
    with capture_logs() as lines:
        gate.opened.set()
        with pytest.raises(ZeroDivisionError):
            await failing
        assert [(await task).value for task in sound] == [[2, 4], [6, 8]]
    await blocked
    assert batcher.passes == [[1, -1, 3], [1], [-1], [3], [2, 4]]
    assert [line["sessions"] for line in lines] == [3]


async def test_an_error_is_thrown_into_the_job_which_may_go_on(worker):
    def job():
        try:
            yield -1
        except ZeroDivisionError:
            return (yield 4)

    assert (await worker.step("a", job)).value == 8


@pytest.mark.parametrize("when", ["begin", "after the pass"])
async def test_a_job_that_fails_in_its_own_code_hurts_its_own_session_alone(worker, batcher, when):
    def fails():
        if when == "after the pass":
            yield 5
        raise KeyError(when)
        yield

    gate, blocked = await held(worker)
    failing = await queued(worker, worker.step("a", fails))
    sound = await queued(worker, worker.step("b", asks(1)))
    gate.opened.set()
    with pytest.raises(KeyError):
        await failing
    assert (await sound).value == [2]
    assert (await worker.step("a", asks(1))).value == [2]  # and its session is not stuck
    await blocked


async def test_a_batcher_that_fails_or_chooses_nobody_fails_those_that_wait_and_no_others(worker, batcher):
    batcher.choose = lambda waiting: waiting[0].request // 0
    with pytest.raises(ZeroDivisionError):
        await worker.step("a", asks(1))
    batcher.choose = lambda waiting: []
    with pytest.raises(RuntimeError, match="none was chosen"):
        await worker.step("a", asks(1))
    batcher.choose = lambda waiting: [Waiting("stranger", 1, 0.0)]
    with pytest.raises(KeyError):
        await worker.step("a", asks(1))
    batcher.choose = lambda waiting: waiting
    assert (await worker.step("a", asks(1))).value == [2]


async def test_a_plan_that_fails_fails_all_that_wait_and_not_the_oldest_alone(worker, batcher):
    def fail_once(waiting):
        batcher.choose = lambda waiting: waiting
        raise ZeroDivisionError

    gate, blocked = await held(worker)
    tasks = [await queued(worker, worker.step(session, asks(1))) for session in "abc"]
    batcher.choose = fail_once
    gate.opened.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 3
    assert batcher.passes == []
    assert worker.heartbeat().waiting == 0
    await blocked


async def test_a_pass_with_answers_missing_is_an_error(worker, batcher):
    batcher.compute = lambda chosen: []
    with pytest.raises(RuntimeError, match="1 requests gave 0 answers"):
        await worker.step("a", asks(1))


async def test_a_job_given_up_before_it_began_never_begins(worker, batcher):
    gate, blocked = await held(worker)
    doomed = await queued(worker, worker.step("a", asks(1)))
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert worker.heartbeat().waiting == 0
    gate.opened.set()
    await blocked
    assert (await worker.step("a", asks(2))).value == [4]
    assert batcher.passes == [[2]]


async def test_a_job_given_up_while_another_one_begins_before_it_never_begins(worker, batcher):
    gate, blocked = await held(worker)
    begins, began = Gate(), []
    ahead = await queued(worker, worker.run("a", begins))
    doomed = await queued(worker, worker.step("b", lambda: began.append("b") or asks(1)()))
    gate.opened.set()
    await asyncio.to_thread(begins.entered.wait, 10)  # both have left the queue
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    begins.opened.set()
    await asyncio.gather(blocked, ahead)
    assert (await worker.step("b", asks(2))).value == [4]
    assert began == []
    assert batcher.passes == [[2]]


async def test_a_job_given_up_while_it_waits_is_closed_and_its_session_goes_on(worker, batcher):
    batcher.choose = lambda waiting: [each for each in waiting if each.request != 99]
    batcher.patience = lambda waiting: 0 if batcher.choose(waiting) else 60
    begun, closed = threading.Event(), []

    def job():
        begun.set()
        try:
            yield 99
        finally:
            closed.append(threading.current_thread().name)

    doomed = asyncio.create_task(worker.step("a", job))
    await asyncio.to_thread(begun.wait, 10)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert (await worker.step("a", asks(1))).value == [2]
    assert closed == ["model"]
    assert worker.heartbeat().waiting == 0


async def test_a_job_given_up_in_its_pass_gets_the_answer_and_asks_in_vain_for_more(worker, batcher):
    seen = []

    def job():
        seen.append((yield 1))
        try:
            yield 2
        finally:
            seen.append("closed")

    gate, doomed = await in_pass(worker, batcher, "a", job)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    after = asyncio.create_task(worker.run("a", lambda: seen.append("next of the session")))
    gate.opened.set()
    await after
    assert seen == [2, "closed", "next of the session"]
    assert batcher.passes == [[1]]


async def test_closing_ends_jobs_that_wait_and_closes_them(batcher):
    worker = BatchWorker("model", batcher)
    gate, running = await in_pass(worker, batcher, "a", asks(1))
    closed = threading.Event()

    def job():
        try:
            yield 2
        finally:
            closed.set()

    planned = threading.Event()
    batcher.patience = lambda waiting: planned.set() or 60
    waiting = await queued(worker, worker.step("b", job))
    gate.opened.set()
    assert (await running).value == [2]
    await asyncio.to_thread(planned.wait, 10)
    closing = asyncio.create_task(worker.close())
    with pytest.raises(WorkerClosedError):
        await waiting
    await closing
    assert closed.is_set()


async def test_patience_ends_as_soon_as_one_more_comes(worker, batcher):
    planned = threading.Event()
    batcher.patience = lambda waiting: 0 if len(waiting) > 1 else planned.set() or 60
    first = asyncio.create_task(worker.step("a", asks(1)))
    await asyncio.to_thread(planned.wait, 10)
    assert worker.heartbeat().waiting == 1
    second = asyncio.create_task(worker.step("b", asks(2)))
    await asyncio.gather(first, second)
    assert batcher.passes == [[1, 2]]


async def test_patience_ends_at_its_end(worker, batcher):
    planned = []
    batcher.patience = lambda waiting: planned.append(time.monotonic()) or (0.001 if len(planned) == 1 else 0)
    await worker.step("a", asks(1))
    assert len(planned) == 2
    assert batcher.passes == [[1]]


async def test_the_times_of_a_job_add_up_to_its_stay(worker, batcher):
    started = time.monotonic()
    gate, running = await in_pass(worker, batcher, "a", asks(1, 2))
    waiting = await queued(worker, worker.step("b", asks(3)))
    gate.opened.set()
    first, second = await asyncio.gather(running, waiting)
    elapsed_us = 1e6 * (time.monotonic() - started)
    for each in (first, second):
        assert each.queue_us + each.run_us <= elapsed_us + 1
    assert second.queue_us > 0
    assert first.run_us > 0


async def test_nothing_of_a_failed_job_is_kept_alive_by_its_error(worker):
    class Tensor:
        pass

    kept = []

    def job():
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        yield -1

    with pytest.raises(ZeroDivisionError) as caught:
        await worker.step("a", job)
    await worker.run("a", lambda: None)
    gc.collect()
    assert caught.value is not None
    assert kept[0]() is None


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(-1, 50), max_size=4), st.booleans()), min_size=1, max_size=20
    )
)
def test_whatever_comes_every_job_ends_and_nothing_is_left(jobs):
    """Random jobs of some sessions, some that fail, some given up at a random moment."""

    async def scenario() -> None:
        batcher = Doubler()
        batcher.choose = lambda waiting: waiting[:2]
        worker = BatchWorker("model", batcher)
        tasks = []
        for number, (session, requests, given_up) in enumerate(jobs):
            tasks.append(asyncio.create_task(worker.step(session, asks(*requests))))
            if number % 3 == 0:
                await asyncio.sleep(0)
            if given_up:
                tasks[number // 2].cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        for (_, requests, _), result in zip(jobs, results, strict=True):
            if isinstance(result, ZeroDivisionError):
                assert -1 in requests
            elif not isinstance(result, asyncio.CancelledError):
                assert result.value == [2 * request for request in requests]
        for session in range(6):
            await worker.run(session, lambda: None)
        assert worker.heartbeat().waiting == 0
        assert not worker._busy
        await worker.close()

    with capture_logs():
        asyncio.run(scenario())


def test_the_end_of_work_is_told_once_whoever_tells_it_first():
    told = []
    item = WorkItem("a", lambda: None, lambda value, error: told.append((value, error)))
    item.end(1)
    item.end(None, WorkerClosedError())
    assert told == [(1, None)]
