"""One session's part in the advice on rows: what it was advised, and how long its peer took for the next tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from eagle_pangu.speculation.tree import TokenTree
from teacher_service.advice import Advice
from teacher_service.scheduler import Scheduler


class Pace:
    """On the event loop.

    Args:
        advice: of all sessions.
        scheduler: knows how many there are.
        asked: drafted rows that the session opened for.
        advises: whether the peer is told; the advice learns from its rounds all the same.

    Attributes:
        advised: drafted rows for its next tree; None: as many as asked for.
    """

    def __init__(self, advice: Advice, scheduler: Scheduler, asked: int, *, advises: bool) -> None:
        self._advice = advice
        self._scheduler = scheduler
        self._asked = asked
        self._advises = advises
        self.advised: int | None = None
        self._answered = time.monotonic()

    def heard(self, tree: TokenTree) -> None:
        """The next round's tree is here."""
        self._advice.observe_gap(time.monotonic() - self._answered, drafted=tree.drafted > 0)

    def decided(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """It is verified. The advice learns of it once the answer is on its way: no round waits for that."""
        budget = self._asked if self.advised is None else self.advised
        asyncio.get_running_loop().call_soon(self._advice.observe_verdict, tree, accepted, budget)

    def next_rows(self, *, joins: bool = False) -> int | None:
        """Drafted rows for the next tree, None: as many as asked for; said as the answer goes out.

        Args:
            joins: its first round is to come, so it is not among those that share the model yet.
        """
        self._answered = time.monotonic()
        if self._advises:
            self.advised = self._advice.rows(self._scheduler.sessions + joins, self._asked)
        return self.advised
