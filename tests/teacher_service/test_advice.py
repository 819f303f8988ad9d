"""Advice finds what is best for the machine and the draft as they are, which it sees through noise only."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from eagle_pangu.speculation.tree import TokenTree
from teacher_service.advice import FEWEST_VERDICTS, Advice
from teacher_service.pass_costs import LADDER, PassCost

Cost = Callable[[int], float]

ASKED = 16


def linear(rows: int) -> float:
    return 0.010 + 0.0005 * rows


def convex(rows: int) -> float:
    return 0.010 + 0.00002 * rows + 0.000004 * rows**2


def flat(rows: int) -> float:
    return 0.020


class World:
    """Sessions in step: a chain is accepted row by row, each with a chance of `hit`.

    Args:
        cost: seconds of a pass by rows, as it really is.
        warm_up: as it was at warm-up; None: the same.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        hit: float = 0.6,
        draft_seconds: float = 0.004,
        plain_seconds: float = 0.001,
        noise: float = 0.0,
        warm_up: Cost | None = None,
    ) -> None:
        self.cost = cost
        self.hit = hit
        self.gaps = plain_seconds, draft_seconds
        self.advice = Advice([PassCost(rows, (warm_up or cost)(rows)) for rows in LADDER])
        self._noise = noise
        self._random = random.Random(3)

    def run(self, sessions: int, cycles: int, asked: int = ASKED) -> list[int]:
        """Each session's rows in each cycle, as advised."""
        taken, rows = [], [asked] * sessions
        for _ in range(cycles):
            self.advice.observe_pass(sum(rows) + sessions, self._noisy(self.cost(sum(rows) + sessions)))
            for session, drafted in enumerate(rows):
                self.advice.observe_verdict(*self._round(drafted))
                advised = self.advice.rows(sessions, asked)
                rows[session] = asked if advised is None else advised
                self.advice.observe_gap(self._noisy(self.gaps[rows[session] > 0]), rows[session] > 0)
            taken += rows
        return taken

    def rate(self, sessions: int, rows: int) -> float:
        """Tokens a second, in truth."""
        tokens = sum(self.hit**depth for depth in range(rows + 1))
        return sessions * tokens / (self.cost(sessions * (rows + 1)) + self.gaps[rows > 0])

    def best(self, sessions: int, asked: int = ASKED) -> int:
        """By brute force."""
        return max(range(asked + 1), key=lambda rows: self.rate(sessions, rows))

    def _round(self, drafted: int) -> tuple[TokenTree, list[int]]:
        depth = 0
        while depth < drafted and self._random.random() < self.hit:
            depth += 1
        rows = np.arange(drafted + 1)
        return TokenTree.build(rows, np.maximum(rows - 1, 0), -rows), list(range(1, depth + 1))

    def _noisy(self, seconds: float) -> float:
        slow = 30 if self._noise and self._random.random() < 0.01 else 1
        return seconds * slow * (1 + self._noise * self._random.uniform(-1, 1))


def usual(taken: list[int]) -> int:
    """What most of the last rounds took: exploring ones are few."""
    last = taken[-len(taken) // 4 :]
    return max(set(last), key=last.count)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("cost", [linear, convex])
@pytest.mark.parametrize("sessions", [2, 4, 8, 32])
def test_the_advice_is_nearly_as_good_as_the_best_in_truth(cost: Cost, sessions: int, noise: float) -> None:
    world = World(cost, noise=noise)
    taken = usual(world.run(sessions, 2000 // sessions + 100))
    assert world.rate(sessions, taken) >= (0.97 if noise == 0 else 0.95) * world.rate(sessions, world.best(sessions))
    assert world.rate(sessions, taken) >= (1 if noise == 0 else 0.97) * world.rate(sessions, 0)


def test_trees_shrink_as_sessions_join_and_grow_as_they_leave() -> None:
    world = World(convex)
    taken = [usual(world.run(sessions, 800 // sessions + 60)) for sessions in (2, 4, 8, 32, 8, 2)]
    assert taken[:4] == sorted(taken[:4], reverse=True)
    assert taken[0] > taken[2] > taken[3] == 0
    assert taken[4:] == pytest.approx([taken[2], taken[0]], abs=1)


def test_where_rows_cost_nothing_everybody_gets_what_it_asked_for() -> None:
    world = World(flat)
    assert set(world.run(32, 100)) == {ASKED}
    assert world.advice.rows(32, ASKED) is None


def test_a_draft_that_costs_more_than_it_brings_is_not_asked() -> None:
    assert usual(World(flat, draft_seconds=0.2).run(8, 100)) == 0


def test_a_draft_that_is_never_right_is_not_asked() -> None:
    assert usual(World(linear, hit=0.0).run(8, 300)) == 0


@pytest.mark.parametrize("sessions", [0, 1])
def test_a_session_alone_gets_what_it_asked_for(sessions: int) -> None:
    world = World(convex, hit=0.0)
    assert usual(world.run(8, 300)) == 0
    assert {world.advice.rows(sessions, ASKED) for _ in range(100)} == {None}


def test_nothing_is_advised_before_enough_is_known() -> None:
    world = World(convex, hit=0.0)
    assert set(world.run(8, 1)) == {ASKED}
    for _ in range(FEWEST_VERDICTS):
        world.advice.observe_verdict(*world._round(4))
    assert world.advice.rows(64, ASKED) is not None
    unmeasured = Advice([])
    unmeasured.observe_pass(8, 1.0)
    unmeasured.observe_gap(1.0, drafted=True)
    for _ in range(FEWEST_VERDICTS):
        unmeasured.observe_verdict(*world._round(4))
    assert unmeasured.rows(64, ASKED) is None
    assert unmeasured.fixed_seconds == 0


def test_a_teacher_only_session_is_advised_nothing() -> None:
    world = World(convex)
    world.run(8, 100)
    assert world.advice.rows(8, 0) is None


def test_exploring_rounds_find_a_draft_that_became_good_and_cost_little() -> None:
    world = World(linear, hit=0.02)
    taken = world.run(16, 300)
    assert usual(taken) == 0
    tail = taken[-16 * 150 :]
    explored = tail.count(ASKED)
    assert 0 < explored <= len(tail) / 16
    cycle = linear(16) + world.gaps[0]
    assert explored / len(tail) * 16 * (linear(16 + ASKED) - linear(16)) <= 2 / 32 * cycle
    world.hit = 0.9
    taken = usual(world.run(16, 1000))
    assert taken > 0
    assert world.rate(16, taken) >= 0.9 * world.rate(16, world.best(16))


def test_it_is_not_always_the_same_session_that_explores() -> None:
    world = World(linear, hit=0.0)
    taken = world.run(8, 1200)[8 * 200 :]
    assert {place % 8 for place, rows in enumerate(taken) if rows == ASKED} == set(range(8))


def test_smaller_trees_leave_what_is_known_of_larger_ones() -> None:
    world = World(flat, hit=0.9)
    world.run(8, 100)
    before = world.advice._acceptance.accepted(ASKED)
    world.hit = 0.5
    for _ in range(1000):
        world.advice.observe_verdict(*world._round(2))
    after = world.advice._acceptance.accepted(ASKED)
    assert np.diff(after)[2:] == pytest.approx(np.diff(before)[2:])
    assert after[1] == pytest.approx(0.5, abs=0.15)
    assert after[2] - after[1] == pytest.approx(0.25, abs=0.15)


def test_a_row_counts_with_the_budget_that_would_have_held_it_and_all_above_it() -> None:
    advice = Advice([])
    #      row: 0  1   2   3   4   5     ranks: 2 -> 1, 1 -> 2, 4 -> 3, 3 -> 4 (a tie, by row), 5 -> 5
    tree = TokenTree.build([9, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3], [0, -2, -1, -3, -2.5, -3])
    advice.observe_verdict(tree, [1, 3, 5])
    assert advice._acceptance.accepted(7).tolist() == [0, 0, 1, 1, 2, 3, 3, 3]
    lifted = TokenTree.build([9, 1, 2], [0, 0, 1], [0, -2, -1])  # no drafter's: a child above its parent
    advice = Advice([])
    advice.observe_verdict(lifted, [1, 2])
    assert advice._acceptance.accepted(2).tolist() == [0, 0, 2]
    advice = Advice([])
    advice.observe_verdict(TokenTree.build([9, 1, 2], [0, 0, 0]), [2])
    assert advice._acceptance.accepted(2).tolist() == [0, 0, 1]


def test_rows_that_a_drafter_leaves_empty_are_neither_accepted_nor_computed() -> None:
    advice = Advice([])
    advice.observe_verdict(TokenTree.build([9, 1, 2], [0, 0, 1], [0, -1, -2]), [1, 2], budget=4)
    advice.observe_verdict(TokenTree.root_only(9), [], budget=4)
    assert advice._acceptance.accepted(4).tolist() == [0, 0.5, 1, 1, 1]
    assert advice._acceptance.computed(5).tolist() == [0, 0.5, 1, 1, 1, 2]
    assert advice._acceptance.verdicts == 1
    advice.observe_verdict(TokenTree.root_only(9), [])
    assert advice._acceptance.accepted(4).tolist() == [0, 0.5, 1, 1, 1]


def test_one_gap_that_took_a_deadline_is_soon_forgotten() -> None:
    world = World(convex)
    expected = usual(world.run(8, 300))
    world.advice.observe_gap(60.0, drafted=True)
    assert usual(world.run(8, 40)) == pytest.approx(expected, abs=1)


def test_a_machine_that_is_slower_than_at_warm_up_is_noticed() -> None:
    world = World(convex, warm_up=flat)
    taken = usual(world.run(16, 600))
    assert world.rate(16, taken) >= 0.9 * world.rate(16, world.best(16))
