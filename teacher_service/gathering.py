"""Whether a pass waits a moment for sessions that are between two rounds.

Every session has a rhythm: its verdict goes out, and some time later its next tree is here. Where that is soon, waiting
for it saves a pass, which costs `fixed` seconds however few rows it has. With w sessions waiting, and k more expected
within t seconds,

    time of overhead a session = fixed / w            for a pass now
                               = (t + fixed) / (w + k)  for a pass then

so once it pays to wait while t < fixed * k / w. But sessions that leave a pass together come back together: what is
saved is saved again in the rounds that follow, so a wait may cost `ROUNDS_SAVED` times as much, and the same in all. A
session alone waits for nobody. Times are in seconds of `time.monotonic`; the clock itself is not read here.
"""

from __future__ import annotations

from collections.abc import Hashable

GAP_RATE = 1 / 8
"""Weight of the newest gap of a session."""
SPREAD_RATE = 1 / 4
"""Weight of its newest distance from the average."""
SPREADS = 1.0
"""A session is expected within its average gap and so many average distances from it."""
ROUNDS_SAVED = 4
"""Rounds that sessions once brought together are taken to stay so, until one ends, or its draft is late."""
ABSENT_SECONDS = 5.0
"""A session that is away for longer counts no more as one that shares the model."""


class _Rhythm:
    """Of one session; `left`: when its last pass was over, None while it waits or is in one."""

    __slots__ = ("gap", "left", "spread")

    def __init__(self) -> None:
        self.left: float | None = None
        self.gap: float | None = None  # average time to its next message
        self.spread = 0.0

    def observe(self, gap: float) -> None:
        if self.gap is None:
            self.gap, self.spread = gap, gap / 2
            return
        self.spread += SPREAD_RATE * (abs(gap - self.gap) - self.spread)
        self.gap += GAP_RATE * (gap - self.gap)


class Gathering:
    """The rhythms of the sessions in rounds, and how long the next pass waits for more of them."""

    def __init__(self) -> None:
        self._rhythms: dict[Hashable, _Rhythm] = {}
        self._began: float | None = None  # to wait for the next pass

    def come(self, session: Hashable, since: float) -> None:
        """A session waits for a pass, since then. May be said more than once."""
        rhythm = self._rhythms.get(session)
        if rhythm is None:
            self._rhythms[session] = _Rhythm()
        elif rhythm.left is not None:
            rhythm.observe(max(0.0, since - rhythm.left))
            rhythm.left = None

    def go(self, session: Hashable, now: float) -> None:
        """A session's pass is over; its next message is awaited."""
        self._rhythms.setdefault(session, _Rhythm()).left = now

    def begin(self) -> None:
        """A pass begins, waited for or not: the wait for the next one has not begun."""
        self._began = None

    def forget(self, session: Hashable) -> None:
        """A session has ended."""
        self._rhythms.pop(session, None)

    def present(self, now: float) -> int:
        """Sessions that share the model: in a pass, waiting for one, or back soon."""
        return sum(each.left is None or now - each.left < ABSENT_SECONDS for each in self._rhythms.values())

    def patience(self, waiting: int, fixed: float, now: float) -> float:
        """Seconds that the next pass had better wait for one more; 0: it begins.

        Args:
            waiting: sessions that would be in it, >= 1.
            fixed: seconds that a pass costs before its rows do.
            now: the time.
        """
        if self._began is None:
            self._began = now
        saved = ROUNDS_SAVED * fixed
        return self._worth(waiting, saved, now, until=self._began + saved)

    def _worth(self, waiting: int, saved: float, now: float, until: float) -> float:
        if len(self._rhythms) <= 1 or saved <= 0:
            return 0.0
        expected = sorted(
            each.left + each.gap + SPREADS * each.spread
            for each in self._rhythms.values()
            if each.left is not None and each.gap is not None
        )
        coming = [when - now for when in expected if now < when < until]
        worth = [seconds for place, seconds in enumerate(coming, 1) if seconds < saved * place / waiting]
        return worth[-1] if worth else 0.0
