"""One worker thread that owns a model: sessions hand in work, and what they need computed shares passes.

A model serves one thread at a time, and an event loop must never wait for a pass. Work is of two kinds: a plain call,
and a job: a generator that yields requests and is sent what a pass gave for each. Of the jobs that wait, the `Batcher`
says which make the next pass and computes it. It knows neither models nor sessions' state nor gRPC: a session is any
hashable key, a request whatever jobs and batcher agree on. Imports no torch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.work_items import WorkerClosedError, WorkItem, forget_frames, notes, settles

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")
Job: TypeAlias = Generator[R, S, T]
"""Yields a request for a pass, is sent what the pass gave for it, and so on; returns its value."""

CLOSE_SECONDS = 10.0

log = get_logger(__name__)


class Waiting(NamedTuple, Generic[R_co]):
    """A session's request for a pass; since: when it began to wait, in seconds of `time.monotonic`: for a job's first
    request when the job was handed in."""

    session: Hashable
    request: R_co
    since: float


class Chosen(NamedTuple, Generic[R_co]):
    """One that waited, and what is computed of its request now (a part of it, where jobs and batcher agree on that)."""

    waiting: Waiting[R_co]
    request: R_co


class Plan(NamedTuple, Generic[R_co]):
    """The next pass, >= 1 chosen; or, where patience > 0, none yet: others are due, so wait so many seconds at most for
    one more to come, then plan again."""

    chosen: Sequence[Chosen[R_co]]
    patience: float = 0.0


class Batcher(Protocol[R, S_co]):
    """Says which requests share a pass, and computes it. Called on the worker's thread alone."""

    def plan(self, waiting: Sequence[Waiting[R]], now: float) -> Plan[R]:
        """Choose among those that wait, >= 1, in order of arrival, at a time of `time.monotonic`."""
        ...

    def compute(self, chosen: Sequence[Chosen[R]]) -> Sequence[S_co]:
        """One pass; an answer to each, in order. Where it raises, each is computed again on its own, so it must leave a
        state that this can start from."""
        ...


class Finished(NamedTuple, Generic[T]):
    """The value of some work, and its times in microseconds on the monotonic clock.

    queue_us: spent waiting, for the thread and for passes. run_us: in its own code and in passes, shared ones in full.
    """

    value: T
    queue_us: int
    run_us: int


class Heartbeat(NamedTuple):
    """Life signs of the worker, in seconds of `time.monotonic`.

    busy_since: start of the pass or the call that runs now; None when none does.
    last_finished: end of the last call or job, or its start.
    waiting: calls and jobs that wait.
    """

    busy_since: float | None
    last_finished: float
    waiting: int


class BatchWorker(Generic[R, S]):
    """Runs calls and jobs: first in first out within a session; between them calls take turns, and jobs share passes.

    Args:
        name: of the thread.
        batcher: plans and computes the passes.
    """

    def __init__(self, name: str, batcher: Batcher[R, S]) -> None:
        self._batcher = batcher
        self._changed = threading.Condition()  # guards the queues, the leavers and the end
        self._queues: dict[Hashable, deque[WorkItem]] = {}  # not begun; next session to serve first
        self._leavers: list[WorkItem] = []  # given up after they had begun
        self._closed = False
        # The worker's own: sessions of which an item has begun; what begins now; jobs that wait for a pass.
        self._busy: set[Hashable] = set()
        self._beginning: deque[WorkItem] = deque()
        self._parked: dict[Hashable, WorkItem] = {}
        self._patience = 0.0
        self._busy_since: float | None = None
        self._last_finished = time.monotonic()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    async def run(self, session: Hashable, work: Callable[[], T]) -> Finished[T]:
        """Call ``work`` on the worker's thread.

        Cancelling the caller takes back work that still waits; a call that runs goes on to its end, its value dropped.

        Raises:
            WorkerClosedError: the worker closed first.
            Exception: whatever ``work`` raises; the worker and the other sessions go on.
        """
        return await self._finish(session, work, is_job=False)

    async def step(self, session: Hashable, job: Callable[[], Job[R, S, T]]) -> Finished[T]:
        """Make a job on the worker's thread and see it to its end.

        Where a pass fails for its request, the error is thrown into it. Cancelling the caller closes a job that waits;
        one in a pass is sent what that gives, and closed if it asks for more.

        Raises:
            WorkerClosedError: the worker closed first.
            Exception: whatever the job raises; the worker and the other sessions go on.
        """
        return await self._finish(session, job, is_job=True)

    def submit(self, session: Hashable, work: Callable[[], object], done: Callable[[], None] | None = None) -> None:
        """Call ``work`` after what `session` has handed in before, with nobody waiting for it.

        It is dropped when the worker closes first; an exception is logged.

        Args:
            session: whose turn it takes.
            work: called on the worker's thread.
            done: called on the running event loop when the work has ended, failed or been dropped.
        """
        item = WorkItem(session, work, notes(done))
        if not self._hand_in(item):
            item.end(None, WorkerClosedError("the worker is closed"))

    def heartbeat(self) -> Heartbeat:
        """Life signs for health checks; cheap, from any thread."""
        with self._changed:
            queued = sum(map(len, self._queues.values()))
        return Heartbeat(self._busy_since, self._last_finished, queued + len(self._beginning) + len(self._parked))

    async def close(self) -> None:
        """Fail what waits with WorkerClosedError, let the running pass or call end, stop the thread. Idempotent.

        A pass or call that takes longer than `CLOSE_SECONDS` (a model that loads) is left to die with the process.
        """
        with self._changed:
            self._closed = True
            waiting = [item for items in self._queues.values() for item in items]
            self._queues.clear()
            self._changed.notify()
        for item in [*waiting, *list(self._beginning), *list(self._parked.values())]:
            item.end(None, WorkerClosedError("the worker closed before this was done"))
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    async def _finish(self, session: Hashable, work: Callable[[], Any], *, is_job: bool) -> Finished[Any]:
        future: asyncio.Future[Finished[Any]] = asyncio.get_running_loop().create_future()
        item = WorkItem(session, work, settles(future), is_job=is_job)
        if not self._hand_in(item):
            raise WorkerClosedError("the worker is closed")
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(item)
            raise

    def _hand_in(self, item: WorkItem) -> bool:
        with self._changed:
            if self._closed:
                return False
            self._queues.setdefault(item.session, deque()).append(item)
            self._changed.notify()
            return True

    def _give_up(self, item: WorkItem) -> None:
        with self._changed:
            items = self._queues.get(item.session)
            if items is not None and item in items:
                items.remove(item)
                if not items:
                    del self._queues[item.session]
                return
            item.abandoned = True
            self._leavers.append(item)
            self._changed.notify()

    # From here on: the worker's thread.

    def _live(self) -> None:
        while self._take():
            while self._beginning and not self._closed:
                self._begin(self._beginning.popleft())
            if self._parked and not self._closed:
                self._pass()
        for item in self._parked.values():
            self._drop(item)

    def _take(self) -> bool:
        """Wait for something to do, and take one item of every session of which none has begun; False once closed."""
        with self._changed:
            if not self._has_something_to_do():
                self._busy_since = None
                self._changed.wait_for(self._has_something_to_do, self._patience if self._parked else None)
            self._patience = 0.0
            for session in [each for each in self._queues if each not in self._busy]:
                items = self._queues.pop(session)
                self._beginning.append(items.popleft())
                if items:
                    self._queues[session] = items  # behind every other session that waits
            leavers, self._leavers = self._leavers, []
            closed = self._closed
        for item in leavers:
            if self._parked.get(item.session) is item:
                del self._parked[item.session]
                self._drop(item)
        return not closed

    def _has_something_to_do(self) -> bool:
        if self._closed or self._leavers or (self._parked and self._patience <= 0):
            return True
        return any(session not in self._busy for session in self._queues)

    def _begin(self, item: WorkItem) -> None:
        self._busy_since = now = time.monotonic()
        item.has_waited(now)
        if item.abandoned:
            return
        self._busy.add(item.session)
        try:
            value = item.within(item.work)
        except BaseException as error:  # noqa: BLE001 -- it is the awaiting session's to handle, whatever it is
            forget_frames(error)
            self._end(item, error=error)
            return
        if item.is_job:
            item.steps = value
            self._go_on(item, value.send, None)
        else:
            self._end(item, value)

    def _go_on(self, item: WorkItem, resume: Callable[[Any], Any], given: Any) -> None:
        """Run a job up to its next request, or to its end."""
        try:
            request = item.within(resume, given)
        except StopIteration as stop:
            self._end(item, stop.value)
        except BaseException as error:  # noqa: BLE001
            forget_frames(error)
            self._end(item, error=error)
        else:
            now = time.monotonic()
            item.has_run(now)
            item.waiting = Waiting(item.session, request, item.handed_in if item.waiting is None else now)
            self._parked[item.session] = item

    def _pass(self) -> None:
        """Plan a pass, compute it, and let its jobs go on."""
        self._busy_since = now = time.monotonic()
        try:
            chosen, self._patience = self._plan(now)
            if self._patience > 0:
                return
            items = [self._parked[each.waiting.session] for each in chosen]
        except BaseException as error:  # noqa: BLE001 -- without a plan nobody would ever be served
            items = list(self._parked.values())
            self._parked.clear()
            outcomes: Sequence[Any] = [_Failure(error)] * len(items)
        else:
            started = time.monotonic()
            for item in items:
                del self._parked[item.session]
                item.has_waited(started)
            outcomes = self._compute(chosen)
            ended = time.monotonic()
            for item in items:
                item.has_run(ended)
        for item, outcome in zip(items, outcomes, strict=True):
            self._busy_since = now = time.monotonic()
            item.has_waited(now)
            assert item.steps is not None
            if isinstance(outcome, _Failure):
                self._go_on(item, item.steps.throw, outcome.error)
            else:
                self._go_on(item, item.steps.send, outcome)

    def _plan(self, now: float) -> Plan[R]:
        waiting = sorted((item.waiting for item in self._parked.values()), key=_since)
        plan = self._batcher.plan(waiting, now)
        if not plan.chosen and plan.patience <= 0:
            raise RuntimeError(f"of {len(self._parked)} that wait for a pass none was chosen")
        return plan

    def _compute(self, chosen: Sequence[Chosen[R]]) -> list[Any]:
        """What the pass gave for each; where it fails, each runs alone, so that only the one at fault does."""
        try:
            results = list(self._batcher.compute(chosen))
            if len(results) != len(chosen):
                raise RuntimeError(f"a pass over {len(chosen)} requests gave {len(results)} answers")
        except BaseException as error:  # noqa: BLE001
            forget_frames(error)
            if len(chosen) == 1:
                return [_Failure(error)]
            log.warning("a shared pass failed, its sessions run alone", sessions=len(chosen), error=repr(error))
            return [outcome for each in chosen for outcome in self._compute([each])]
        return results

    def _end(self, item: WorkItem, value: Any = None, *, error: BaseException | None = None) -> None:
        self._last_finished = now = time.monotonic()
        item.has_run(now)
        self._busy.discard(item.session)
        item.end(None if error else Finished(value, item.queued_us, item.ran_us), error)

    def _drop(self, item: WorkItem) -> None:
        """End an item of which nobody wants to hear, and let it tidy up."""
        self._busy.discard(item.session)
        if item.steps is None:
            return
        try:
            item.within(item.steps.close)
        except BaseException as error:
            forget_frames(error)
            log.error("a job failed while it was closed", exc_info=error)


def _since(waiting: Waiting[object]) -> float:
    return waiting.since


class _Failure(NamedTuple):
    error: BaseException
