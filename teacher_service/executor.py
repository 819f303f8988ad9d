"""The model executor: one worker thread that owns all model work.

An engine serves one thread at a time, and an event loop must never wait for a forward pass. Sessions hand in small work
items (one prefill chunk, one verification) and await them; the worker takes them round-robin over the sessions, so a
long prefill delays another session's round by one chunk at most. It knows nothing of models, sessions' state or gRPC: a
session is any hashable key, a work item any callable.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

from eagle_pangu.serving.logs import get_logger

T = TypeVar("T")
CLOSE_SECONDS = 10.0

log = get_logger(__name__)


class ExecutorClosedError(RuntimeError):
    """The executor stopped before the work item ran."""


class Finished(NamedTuple, Generic[T]):
    """The value of a work item, and its times in microseconds on the monotonic clock."""

    value: T
    queue_us: int
    run_us: int


class Heartbeat(NamedTuple):
    """Life signs of the worker, in seconds of `time.monotonic`.

    busy_since: start of the item that runs now; None when none does.
    last_finished: end of the last item, or the executor's own start.
    waiting: items queued.
    """

    busy_since: float | None
    last_finished: float
    waiting: int


class _Item(NamedTuple):
    work: Callable[[], Any]
    future: Future[Finished[Any]]
    queued_at: float
    context: contextvars.Context  # of the caller, whose ids its log lines carry


class Executor:
    """Runs work items one at a time, fair between sessions, first in first out within one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: OrderedDict[Hashable, deque[_Item]] = OrderedDict()  # next session to serve first
        self._closed = False
        self._busy_since: float | None = None
        self._last_finished = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    async def run(self, session: Hashable, work: Callable[[], T]) -> Finished[T]:
        """Run ``work`` on the worker thread.

        Cancelling the caller removes an item that still waits; one that runs goes on to its end, its value dropped.

        Raises:
            ExecutorClosedError: the executor closed first.
            Exception: whatever ``work`` raises; the executor and the items of other sessions go on.
        """
        future: Future[Finished[T]] = Future()
        item = _Item(work, future, time.monotonic(), contextvars.copy_context())
        with self._changed:
            if self._closed:
                raise ExecutorClosedError("the model executor is closed")
            self._hand_in(session, item)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._discard(session, item)
            raise

    def submit(self, session: Hashable, work: Callable[[], object]) -> None:
        """Run ``work`` after what `session` has handed in before, with nobody waiting for it.

        It is dropped when the executor closes first; an exception is logged.
        """
        future: Future[Finished[object]] = Future()
        context = contextvars.copy_context()
        future.add_done_callback(lambda done: context.run(_log_failure, done))
        with self._changed:
            if not self._closed:
                self._hand_in(session, _Item(work, future, time.monotonic(), context))

    def heartbeat(self) -> Heartbeat:
        """Life signs for health checks; cheap, from any thread."""
        with self._changed:
            waiting = sum(len(items) for items in self._queues.values())
            return Heartbeat(self._busy_since, self._last_finished, waiting)

    async def close(self) -> None:
        """Fail the waiting items with ExecutorClosedError, let the running one end, stop the thread. Idempotent.

        A running item that takes longer than `CLOSE_SECONDS` (a model that loads) is left to die with the process.
        """
        with self._changed:
            self._closed = True
            waiting = [item for items in self._queues.values() for item in items]
            self._queues.clear()
            self._changed.notify()
        for item in waiting:
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(ExecutorClosedError("the model executor closed before this item ran"))
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _hand_in(self, session: Hashable, item: _Item) -> None:
        self._queues.setdefault(session, deque()).append(item)
        self._changed.notify()

    def _discard(self, session: Hashable, item: _Item) -> None:
        with self._changed:
            items = self._queues.get(session)
            if items is not None and item in items:
                items.remove(item)
                if not items:
                    del self._queues[session]

    def _work(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Run the next item; False once closed."""
        item = self._take()
        if item is None:
            return False
        started = time.monotonic()
        if item.future.set_running_or_notify_cancel():
            try:
                value = item.context.run(item.work)
            except BaseException as error:  # noqa: BLE001 -- it is the awaiting session's to handle, whatever it is
                # Its traceback outlives the session in logs and cycles; the tensors in those frames must not.
                traceback.clear_frames(error.__traceback__)
                item.future.set_exception(error)
            else:
                run_us = _microseconds(time.monotonic() - started)
                item.future.set_result(Finished(value, _microseconds(started - item.queued_at), run_us))
        with self._changed:
            self._busy_since = None
            self._last_finished = time.monotonic()
        return True

    def _take(self) -> _Item | None:
        with self._changed:
            while not self._queues and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            session, items = self._queues.popitem(last=False)
            item = items.popleft()
            if items:
                self._queues[session] = items  # behind every other session that waits
            self._busy_since = time.monotonic()
            return item


def _log_failure(future: Future[Finished[object]]) -> None:
    error = future.exception()
    if error is not None and not isinstance(error, ExecutorClosedError):
        log.error("work after a session failed", exc_info=error)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
