"""The cost of a pass: its shape from warm-up, its height from the passes that follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_pangu.speculation.engine import Engine, ForwardResult
from eagle_pangu.speculation.segment import Segment
from teacher_service import pass_costs
from teacher_service.pass_costs import LADDER, LONGEST_SECONDS, MOST_SESSIONS, PassCost, PassCosts, climb, measure_costs
from tests.speculation.engines import NUMERICS, bushy_tree, engine, prompt

ROWS = np.arange(1.0, 400)


def costs(*seconds: float) -> PassCosts:
    return PassCosts([PassCost(rows, each) for rows, each in zip(LADDER, seconds, strict=False)])


def test_the_ladder_is_met_on_its_rungs_and_straight_between_and_beyond() -> None:
    linear = costs(*(0.010 + 0.001 * rows for rows in LADDER))
    assert linear.seconds(ROWS) == pytest.approx(0.010 + 0.001 * ROWS)
    assert costs(0.02).seconds(np.array([1.0, 3.0])) == pytest.approx([0.02, 0.06])


def test_a_rung_that_seems_cheaper_than_a_smaller_one_is_noise() -> None:
    seconds = costs(0.02, 0.01, 0.03, 0.025, 0.05, 0.04, 0.08, 0.07).seconds(ROWS)
    assert (np.diff(seconds) >= 0).all()
    assert seconds[-1] > seconds[127] == 0.08


@pytest.mark.parametrize(("offset", "factor"), [(0.0, 2.0), (0.010, 1.0), (0.005, 3.0), (0.0, 0.5)])
def test_passes_of_several_sizes_tell_what_warm_up_did_not(offset: float, factor: float) -> None:
    truth = offset + factor * (0.010 + 0.001 * ROWS)
    learned = costs(*(0.010 + 0.001 * rows for rows in LADDER))
    noise = random.Random(1)
    for step in range(600):
        rows = (16, 24, 144)[step % 3]
        slow = 50 if step % 97 == 0 else 1
        learned.observe(rows, slow * float(truth[rows - 1]) * noise.uniform(0.8, 1.2))
    assert learned.seconds(ROWS[15:200]) == pytest.approx(truth[15:200], rel=0.25)


def test_passes_of_one_size_move_the_whole_ladder() -> None:
    learned = costs(*(0.010 + 0.001 * rows for rows in LADDER))
    before = learned.seconds(ROWS)
    for _ in range(200):
        learned.observe(32, 0.084)
    assert learned.seconds(32.0) == pytest.approx(0.084, rel=0.1)
    assert (learned.seconds(ROWS)[31:] > 1.3 * before[31:]).all()


def test_rows_that_were_free_at_warm_up_may_cost_later() -> None:
    learned = costs(*(0.020 for _ in LADDER))
    for step in range(300):
        rows = (300, 320, 400)[step % 3]
        learned.observe(rows, 0.001 * rows)
    assert learned.seconds(np.array([300.0, 400.0])) == pytest.approx([0.3, 0.4], rel=0.1)
    assert learned.seconds(16.0) < 0.03


@pytest.mark.parametrize(("small", "large"), [(0.1, 0.02), (0.1, 0.4), (1e-4, 1e-4), (0.0, 10.0)])
def test_costs_never_fall_with_rows_whatever_is_seen(small: float, large: float) -> None:
    learned = costs(*(0.010 + 0.001 * rows for rows in LADDER))
    for _ in range(100):
        learned.observe(8, small)
        learned.observe(200, large)
        seconds = learned.seconds(ROWS)
        assert (np.diff(seconds) >= 0).all()
        assert seconds[0] > 0


def test_the_fixed_part_is_what_two_passes_save_as_one() -> None:
    assert costs(*(0.010 + 0.001 * rows for rows in LADDER)).fixed_seconds == pytest.approx(0.010)
    assert costs(*(0.020 for _ in LADDER)).fixed_seconds == pytest.approx(0.020)
    assert costs(*(0.001 * rows for rows in LADDER)).fixed_seconds == pytest.approx(0.0)
    assert costs(0.5).fixed_seconds == 0


def test_the_climb_takes_the_fastest_of_a_few_and_leaves_out_the_first() -> None:
    times = iter([0.001, 0.03, 0.01, 0.02, 0.001, 0.02, 0.03, 0.04])
    assert climb(lambda rows: next(times), 2) == [PassCost(1, 0.01), PassCost(2, 0.02)]
    assert next(times, None) is None


def test_the_climb_ends_where_passes_are_long() -> None:
    asked: list[int] = []

    def measure(rows: int) -> float:
        asked.append(rows)
        return LONGEST_SECONDS * rows / 6

    assert [rung.rows for rung in climb(measure, 128)] == [1, 2, 4, 8]
    assert asked.count(8) == 2  # once for first use; a long one is not repeated


def test_the_climb_ends_when_it_took_long_in_all() -> None:
    spent: list[float] = []

    def measure(rows: int) -> float:
        spent.append(0.9)
        return 0.9

    assert 2 <= len(climb(measure, 128)) < len(LADDER)
    assert sum(spent) <= 6


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rung is measured, once, however busy the machine is."""
    monkeypatch.setattr(pass_costs, "TIMES", 1)
    monkeypatch.setattr(pass_costs, "LONGEST_SECONDS", np.inf)
    monkeypatch.setattr(pass_costs, "MOST_SECONDS", np.inf)


class Watched:
    """An engine whose passes over trees are noted: rows of each session."""

    def __init__(self, target: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[list[int]] = []
        run = target.run

        def note(segments: Sequence[Segment]) -> list[ForwardResult]:
            if not segments[0].final:
                self.passes.append([segment.rows for segment in segments])
            return run(segments)

        monkeypatch.setattr(target, "run", note)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
def test_an_engine_is_measured_on_small_trees_and_left_as_it_was(
    tmp_path: Path, mode: str, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine(tmp_path, "llama", mode=mode, numerics=numerics)
    slot, tree = target.open_slot(), bushy_tree(6)
    target.prefill(slot, prompt(9), want_logits=False)
    before = target.verify(slot, tree).logits
    watched = Watched(target, monkeypatch)
    ladder = measure_costs(target)
    assert [rung.rows for rung in ladder] == list(LADDER)
    assert all(rung.seconds > 0 for rung in ladder)
    assert {sum(rows) for rows in watched.passes} == set(LADDER)
    assert max(map(len, watched.passes)) == MOST_SESSIONS
    after = target.verify(slot, tree).logits
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


@pytest.mark.usefixtures("patient")
def test_a_measured_tree_is_never_larger_than_the_engine_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine(tmp_path, "llama", slot_capacity=16, max_rows=2, chunk=4)
    watched = Watched(target, monkeypatch)
    ladder = measure_costs(target)
    assert max(max(rows) for rows in watched.passes) == 3
    assert [rung.rows for rung in ladder] == [rows for rows in LADDER if rows <= 3 * MOST_SESSIONS]
