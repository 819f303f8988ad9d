"""One piece of work of a `BatchWorker`, from hand-in to end: whose it is, where its time went, whom its end is told.

It knows nothing of queues and passes. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import traceback
from collections.abc import Callable, Generator, Hashable
from contextlib import suppress
from typing import Any, TypeAlias

from eagle_pangu.serving.logs import get_logger

Tell: TypeAlias = Callable[[Any, BaseException | None], None]
"""Takes the value, or the error."""

log = get_logger(__name__)


class WorkerClosedError(RuntimeError):
    """The worker closed before the work was done."""


class WorkItem:
    """A call, or a job where `is_job`.

    Attributes:
        handed_in: when, in seconds of `time.monotonic`.
        steps: of a job that has begun.
        waiting: what it waits for, as the worker says it.
        abandoned: nobody wants its value any more.
    """

    def __init__(self, session: Hashable, work: Callable[[], Any], tell: Tell, *, is_job: bool = False) -> None:
        self.session = session
        self.work = work
        self.is_job = is_job
        self.steps: Generator[Any, Any, Any] | None = None
        self.waiting: Any = None
        self.abandoned = False
        self._tell = tell
        self._told = threading.Lock()  # taken once, by who tells
        self._context = contextvars.copy_context()  # of the caller, whose ids its log lines carry
        self.handed_in = self._mark = time.monotonic()  # up to when its time is accounted for
        self._queued = self._ran = 0.0

    @property
    def queued_us(self) -> int:
        """Microseconds that it waited."""
        return round(self._queued * 1e6)

    @property
    def ran_us(self) -> int:
        """Microseconds that its code and its passes ran."""
        return round(self._ran * 1e6)

    def has_waited(self, until: float) -> None:
        """Account for its time up to `until`."""
        self._queued += until - self._mark
        self._mark = until

    def has_run(self, until: float) -> None:
        """Account for its time up to `until`."""
        self._ran += until - self._mark
        self._mark = until

    def within(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call something in the context of who handed the item in."""
        return self._context.run(function, *args)

    def end(self, value: Any, error: BaseException | None = None) -> None:
        """Tell its end, the first one alone; from any thread."""
        if self._told.acquire(blocking=False):
            self._tell(value, error)


def settles(future: asyncio.Future[Any]) -> Tell:
    """Passes an end on to a future of the running event loop, unless its waiter has gone."""
    loop = asyncio.get_running_loop()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    return lambda value, error: _call(loop, settle, value, error)


def notes(done: Callable[[], None] | None) -> Tell:
    """Logs an error that nobody waits for, and calls `done` on the running event loop, however the work ended."""
    loop = asyncio.get_running_loop() if done else None
    context = contextvars.copy_context()

    def tell(value: Any, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, WorkerClosedError):
            context.run(log.error, "work after a session failed", exc_info=error)
        if loop is not None and done is not None:
            _call(loop, done)

    return tell


def forget_frames(error: BaseException) -> None:
    """Its traceback outlives the session in logs and cycles; the tensors in those frames must not.

    The caller's own frame still runs and cannot be cleared: it is left out of the traceback.
    """
    found = error.__traceback__
    traceback.clear_frames(found)
    error.__traceback__ = found.tb_next if found is not None else None


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    with suppress(RuntimeError):  # a loop that is closed has nobody left to tell
        loop.call_soon_threadsafe(function, *args)
