"""How many drafted rows pay while sessions share the model: the tree budget under load.

A tree buys tokens with rows. Alone, the rows of a small tree are nearly free, since a pass reads all weights for one
row or for ten; even so EAGLE-Pangu finds its best budget at 16 nodes, larger trees lose to their overhead. Under load a
pass computes the rows of everyone, the machine is soon busy with them, and every rejected row is time that others
needed: the best tree shrinks as sessions join, down to none.

The rule. With n sessions in rounds and r drafted rows each,

    tokens a second = n * tau(r) / (T(n * (r + 1)) + G(r))          r = 0 .. asked, the best one is advised

    tau(r)  tokens of a round: 1, and a chance for each of the r best rows of a tree
    T(rows) seconds of a pass (`teacher_service.pass_costs`)
    G(r)    seconds from a verdict to the session's next message: one average with a draft, one without

r = 0 is teacher-only decoding, so nothing is advised that is slower than it, as far as the measurements go. It treats
sessions as in step and equal in what they ask for; where they are not, it errs for all alike.

tau comes from every verdict, for every smaller budget too: best-first order of scores is closed under parents (what a
drafter would have sent on a smaller budget is a first part of it), so a row counts for budget r when it and the rows
above it are among the r best. A row of rank k has an average of its own, which trees of fewer rows leave alone; where
the budget is known, rows that the drafter did not fill count as neither accepted nor computed. Past the largest tree
ever seen nothing more is expected.

What is advised is all that is then seen: so now and then, as often as costs little, a round is advised what it asked
for, at random (on a fixed beat it would always be the same session's turn). A session alone gets what it asked for, and
so does everybody until enough is known. Advice changes speed, never a token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.tree import TokenTree
from teacher_service.pass_costs import PassCost, PassCosts

FEWEST_VERDICTS = 16
"""On trees, before anything is advised."""
ROW_RATE = 1 / 128
"""Weight of the newest verdict, once there are so many."""
GAP_RATE = 1 / 32
"""Weight of the newest gap, once there are so many."""
LONGEST_GAP = 4.0
"""A gap counts as at most so many times the average: a missed deadline tells little of the rounds that meet it."""
MOST_EXPLORED = 1 / 16
"""Of the rounds, that are advised what they asked for although fewer rows pay."""
EXPLORING_COST = 1 / 32
"""Of the time, that those may cost all sessions together."""
VERDICTS_A_CHOICE = 32
"""A choice stands for so many verdicts: made anew for each one it would cost more than a round may."""


class _Choice(NamedTuple):
    """rows: that pay best. exploring: share of the rounds that are to try all that they asked for."""

    rows: int
    exploring: float


class Advice:
    """See the module. Passes may be told on another thread than all the rest.

    Args:
        ladder: of warm-up; empty: nothing is ever advised.
    """

    def __init__(self, ladder: Sequence[PassCost]) -> None:
        self._costs = PassCosts(ladder) if ladder else None
        self._acceptance = _Acceptance()
        self._drafted_gap = _Average()
        self._plain_gap = _Average()
        self._random = random.Random(0)
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._choices_left = VERDICTS_A_CHOICE  # verdicts until they are made anew

    @property
    def fixed_seconds(self) -> float:
        """What one pass costs before its rows do; 0 while unknown."""
        return self._costs.fixed_seconds if self._costs else 0.0

    def observe_pass(self, rows: int, seconds: float) -> None:
        """A pass is over; only passes of trees, since rows of prompts cost less.

        Args:
            rows: of all its sessions, roots included, >= 1.
            seconds: that it took.
        """
        if self._costs is not None:
            self._costs.observe(rows, seconds)

    def observe_verdict(self, tree: TokenTree, accepted: Sequence[int], budget: int | None = None) -> None:
        """A round is decided.

        Args:
            tree: verified.
            accepted: rows in path order, root left out.
            budget: drafted rows that the tree could have had; None: as many as it has.
        """
        self._acceptance.observe(tree, accepted, max(tree.drafted, budget or 0))
        self._choices_left -= 1
        if not self._choices_left:
            self._choices_left = VERDICTS_A_CHOICE
            self._choices.clear()

    def observe_gap(self, seconds: float, drafted: bool) -> None:
        """A session's next message is here.

        Args:
            seconds: since its verdict went out.
            drafted: its tree holds more than the root.
        """
        (self._drafted_gap if drafted else self._plain_gap).observe(seconds)

    def rows(self, sessions: int, asked: int) -> int | None:
        """Drafted rows for a session's next tree; None: as many as it asked for.

        Args:
            sessions: in rounds now, this one included.
            asked: what this one opened for.
        """
        costs = self._costs
        if costs is None or sessions <= 1 or asked <= 0:
            return None
        if self._acceptance.verdicts < FEWEST_VERDICTS or not self._drafted_gap.count:
            return None
        choice = self._choices.get((sessions, asked))
        if choice is None:
            choice = self._choices[sessions, asked] = self._choose(costs, sessions, asked)
        if choice.rows == asked or self._random.random() < choice.exploring:
            return None
        return choice.rows

    def _choose(self, costs: PassCosts, sessions: int, asked: int) -> _Choice:
        computed = 1 + self._acceptance.computed(asked)
        seconds = costs.seconds(sessions * computed)
        gaps = np.full(asked + 1, self._drafted_gap.value)
        gaps[0] = self._plain_gap.value  # 0 until there is one: the first round without a draft will tell
        rates = (1 + self._acceptance.accepted(asked)) / (seconds + gaps)
        best = asked - int(np.argmax(rates[::-1]))  # of equals the largest
        with_one = costs.seconds(sessions * computed[best] + computed[asked] - computed[best])
        extra = sessions * float(with_one - seconds[best])  # seconds more, did each of them explore
        affordable = EXPLORING_COST * float(seconds[best] + gaps[best])
        return _Choice(best, MOST_EXPLORED if extra * MOST_EXPLORED <= affordable else affordable / extra)


class _Average:
    """A moving average that outliers do not carry away; 0 before the first value."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def observe(self, value: float) -> None:
        self.count += 1
        if self.count > 1:
            value = min(value, LONGEST_GAP * self.value)
        self.value += max(1 / self.count, GAP_RATE) * (value - self.value)


class _Acceptance:
    """Of the row of each rank, best first: how often it is accepted, and how often it is there at all.

    Attributes:
        verdicts: on trees of more than the root.
    """

    def __init__(self) -> None:
        self.verdicts = 0
        self._counts = np.zeros(0, dtype=np.int64)
        self._means = np.zeros((2, 0))  # accepted, there

    def observe(self, tree: TokenTree, accepted: Sequence[int], budget: int) -> None:
        if budget == 0:
            return
        self.verdicts += tree.drafted > 0
        if budget > len(self._counts):
            new = budget - len(self._counts)
            self._means = np.pad(self._means, ((0, 0), (0, new)))
            self._counts = np.pad(self._counts, (0, new))
        seen = np.zeros((2, budget))
        seen[1, : tree.drafted] = 1
        ranks, needed = _ranks(tree) if accepted else (), 0
        for row in accepted:
            needed = max(needed, ranks[row])
            seen[0, needed - 1] += 1
        self._counts[:budget] += 1
        means = self._means[:, :budget]
        means += np.maximum(1 / self._counts[:budget], ROW_RATE) * (seen - means)

    def accepted(self, most: int) -> NDArray[np.float64]:
        """[most + 1] accepted rows expected with 0, 1, ... `most` rows; nothing of rows never seen."""
        return _sums(self._means[0], most, unseen=0)

    def computed(self, most: int) -> NDArray[np.float64]:
        """[most + 1] rows that a tree has with a budget of 0, 1, ... `most`; all of those never seen."""
        return _sums(self._means[1], most, unseen=1)


def _ranks(tree: TokenTree) -> Sequence[int]:
    """[rows] place of each row, best first, ties by row; the root's is 0. Without scores rows stand as they come."""
    if tree.scores is None:
        return range(tree.rows)
    scores, ranks = tree.scores.tolist(), [0] * tree.rows
    for rank, row in enumerate(sorted(range(1, tree.rows), key=scores.__getitem__, reverse=True), start=1):
        ranks[row] = rank
    return ranks


def _sums(means: NDArray[np.float64], most: int, unseen: float) -> NDArray[np.float64]:
    """[most + 1] of the first 0, 1, ... `most`."""
    each = np.full(most + 1, float(unseen))
    each[0] = 0
    known = min(most, len(means))
    each[1 : known + 1] = means[:known]
    return np.cumsum(each)
