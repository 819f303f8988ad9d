"""What a forward pass costs by the rows that it computes: measured once at warm-up, then corrected by every pass.

The ladder of warm-up gives the shape: piecewise linear, never falling, past its end as steep as over its last two
rungs. Serving adds what warm-up cannot know: longer contexts, work per session, sizes past the ladder, a machine that
others use. So three numbers are fitted to the passes seen, the last few dozen above all: how much dearer the ladder is,
what every pass pays beside it, and what every row does. The ladder counts for a few passes too, since passes of one
size tell none of them apart. It knows neither sessions nor drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.plan import BLOCK
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree

LADDER = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows of the passes measured at warm-up."""
TREE_ROWS = 8
"""Most rows of one session in those: of larger passes most are of many sessions."""
MOST_SESSIONS = 16
PREFIX = BLOCK - TREE_ROWS
"""Tokens before each tree."""
TIMES = 3
"""Each pass is timed so often, and the fastest counts: what disturbs a pass never makes it faster."""
REPEATED_SECONDS = 0.25
"""A pass is not timed again once its times are so long together."""
LONGEST_SECONDS = 1.0
"""No larger pass is measured after one that takes longer."""
MOST_SECONDS = 5.0
"""No larger pass is measured once they took so long together."""

FORGETTING = 0.98
"""Weight of a pass against that of the next one."""
PASSES_A_FIT = 32
"""New passes between two fits: a fit takes longer than many a round may."""
PRIOR_WEIGHT = 4.0
"""Passes that the ladder itself counts for."""
MOST_SURPRISE = 4.0
"""A pass counts as at most so many times slower, or faster, than expected."""
LEAST_SHARE = 0.1
"""Of the ladder, that remains whatever is seen: rows are never free where they were not."""
LOWEST = (-np.inf, LEAST_SHARE - 1, 0.0)
"""Of the numbers fitted: a pass's own part, the ladder's factor less 1, a row's part. So costs never fall with rows."""


class PassCost(NamedTuple):
    """Seconds of one pass over so many rows."""

    rows: int
    seconds: float


class PassCosts:
    """Expected seconds of a pass.

    Args:
        ladder: >= 1 rung, rows ascending, seconds > 0.

    Attributes:
        fixed_seconds: what one pass costs before its rows do: saved where two passes become one.
    """

    def __init__(self, ladder: Sequence[PassCost]) -> None:
        rows, seconds = zip(*ladder, strict=True)
        self._rows = np.array(rows, dtype=np.float64)
        self._seconds = np.maximum.accumulate(np.array(seconds, dtype=np.float64))
        first = max(0, len(ladder) - 3)
        span = self._rows[-1] - self._rows[first]
        rise = self._seconds[-1] - self._seconds[first]
        self._slope = rise / span if span else self._seconds[-1] / self._rows[-1]
        self._parts = self._seconds[0], self._seconds[-1] / self._rows[-1]  # units of a pass's part and of a row's
        rungs = self._basis(self._rows)
        # Normal equations of (observed / ladder - 1) over the basis.
        # The ridge: two of the three may be alike on the rungs.
        self._prior = PRIOR_WEIGHT * (rungs.T @ rungs / len(ladder) + 1e-3 * np.eye(3))
        self._products = np.zeros((3, 3))
        self._surprises = np.zeros(3)
        self._fit = np.zeros(3)
        self._new: list[PassCost] = []
        doubled = self._rows[:-1]
        saved = 2 * self._ladder(doubled) - self._ladder(2 * doubled)
        self._saved = max(0.0, float(np.median(saved))) if saved.size else 0.0
        self.fixed_seconds = self._saved

    def seconds(self, rows: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Of passes of so many rows each, >= 0."""
        ladder = self._ladder(rows)
        return ladder * np.maximum(1 + self._basis(rows) @ self._fit, LEAST_SHARE)

    def observe(self, rows: int, seconds: float) -> None:
        """A pass is over."""
        self._new.append(PassCost(rows, seconds))
        if len(self._new) == PASSES_A_FIT:
            self._take(*np.array(self._new, dtype=np.float64).T)
            self._new = []
            self._fit = self._solve()
            own, dearer, _ = self._fit.tolist()
            self.fixed_seconds = max(0.0, self._saved * (1 + dearer) + own * self._parts[0])

    def _take(self, rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> None:
        """[passes] each, the newest last."""
        expected, basis = self.seconds(rows), self._basis(rows)
        surprises = np.clip(seconds, expected / MOST_SURPRISE, expected * MOST_SURPRISE) / self._ladder(rows) - 1
        weights = FORGETTING ** np.arange(len(rows))[::-1]
        kept = FORGETTING ** len(rows)
        self._products = kept * self._products + (weights * basis.T) @ basis
        self._surprises = kept * self._surprises + basis.T @ (weights * surprises)

    def _solve(self) -> NDArray[np.float64]:
        """Least squares; a number below its lowest is held there, and the others are fitted again."""
        products, fit, free = self._prior + self._products, np.zeros(3), [0, 1, 2]
        while True:
            held = self._surprises - products @ np.where(np.isin(range(3), free), 0.0, fit)
            fit[free] = np.linalg.solve(products[np.ix_(free, free)], held[free])
            low = [each for each in free if fit[each] < LOWEST[each]]
            if not low:
                return fit
            fit[low[0]] = LOWEST[low[0]]
            free.remove(low[0])

    def _basis(self, rows: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """[..., 3] shares of the ladder: a pass's own part, the ladder, the rows' part."""
        own, row = self._parts
        ladder = self._ladder(rows)
        return np.stack([own / ladder, np.ones_like(ladder), row * np.asarray(rows) / ladder], axis=-1)

    def _ladder(self, rows: NDArray[np.float64] | float) -> NDArray[np.float64]:
        beyond = np.maximum(0.0, np.asarray(rows, dtype=np.float64) - self._rows[-1])
        return np.asarray(np.interp(rows, self._rows, self._seconds) + beyond * self._slope, dtype=np.float64)


def climb(measure: Callable[[int], float], most_rows: int) -> list[PassCost]:
    """The ladder of a measure of seconds by rows, as far up as passes stay short."""
    ladder: list[PassCost] = []
    spent = 0.0
    for rows in LADDER:
        if rows > most_rows:
            break
        spent += measure(rows)  # pays for first use
        times = [measure(rows)]
        while len(times) < TIMES and sum(times) < REPEATED_SECONDS:
            times.append(measure(rows))
        spent += sum(times)
        ladder.append(PassCost(rows, min(times)))
        if min(times) > LONGEST_SECONDS or spent > MOST_SECONDS:
            break
    return ladder


def measure_costs(engine: Engine) -> list[PassCost]:
    """The ladder of an engine, in a few seconds. Blocking; leaves nothing behind.

    Small trees of several sessions, each on a slot of its own with a short prompt, and none larger than the engine's
    limit.
    """
    tree_rows = min(TREE_ROWS, engine.max_rows + 1)
    capacity = min(PREFIX + tree_rows, engine.slot_capacity)
    prompt = np.arange(min(capacity - tree_rows, engine.chunk), dtype=np.int64) % engine.checkpoint.vocab_size
    slots = [engine.open_slot(capacity)]
    engine.prefill(slots[0], prompt, want_logits=False)

    def measure(rows: int) -> float:
        sizes = [min(tree_rows, rows - start) for start in range(0, rows, tree_rows)]
        while len(slots) < len(sizes):
            slots.append(engine.open_slot(capacity))
            slots[-1].adopt(slots[0], len(prompt))
        segments = [Segment(slot, _tree(size, engine)) for slot, size in zip(slots, sizes, strict=False)]
        engine.device.synchronize()
        started = time.perf_counter()
        engine.run(segments)
        engine.device.synchronize()
        return time.perf_counter() - started

    return climb(measure, MOST_SESSIONS * tree_rows)


def _tree(rows: int, engine: Engine) -> TokenTree:
    """Two children a row."""
    places = np.arange(rows, dtype=np.int64)
    return TokenTree(places % engine.checkpoint.vocab_size, np.maximum(places - 1, 0) // 2)
