"""Who is in the next pass, on segments of the fake engine: no sessions, no threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import teacher_service.scheduler as scheduler_module
from eagle_pangu.serving.batch_worker import Chosen, Plan, Waiting
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree
from teacher_service.advice import Advice
from teacher_service.batching import Computed
from teacher_service.batching.eqspec import EqSpec
from teacher_service.batching.ragged import Ragged
from teacher_service.scheduler import Scheduler
from tests.teacher_service.fakes import FakeEngine, FakeSlot


class Costs(Advice):
    """Advice of a given fixed cost, that keeps what it is told."""

    def __init__(self, fixed: float = 0.0) -> None:
        super().__init__(())
        self.fixed, self.seen = fixed, []

    @property
    def fixed_seconds(self) -> float:
        return self.fixed

    def observe_pass(self, rows: int, seconds: float) -> None:
        self.seen.append(rows)


class Padded(Ragged):
    """As a rectangle: every tree takes the rows of the longest."""

    def compute(self, engine: FakeEngine, segments: Sequence[Segment]) -> Computed:
        longest = max(segment.rows for segment in segments)
        return Computed(super().compute(engine, segments).results, len(segments) * longest, 7)


class Clock:
    """Every pass takes 3 seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._begun = 100.0, False
        monkeypatch.setattr(scheduler_module, "time", self)

    def monotonic(self) -> float:
        if self._begun:
            self.now += 3.0
        self._begun = not self._begun
        return self.now


class Prompt:
    """A prompt of so many tokens; `after`: another one whose next chunk it waits for."""

    def __init__(self, tokens: int, after: Prompt | None = None) -> None:
        self.slot, self.left, self.after = FakeSlot(10_000), tokens, after
        self.broken = False

    def waits_for(self, other: Prompt) -> bool:
        return other is self.after

    def prepare(self) -> int:
        if self.broken:
            raise MemoryError
        return self.left

    def chunk(self, rows: int) -> Segment:
        rows = min(rows, self.prepare())
        return known_tokens(self.slot, np.zeros(rows, dtype=np.int64), want_logits=rows == self.left)


def tree(rows: int) -> Segment:
    slot = FakeSlot(10_000)
    slot.history = [1]
    return Segment(slot, TokenTree.build(range(rows), [max(0, row - 1) for row in range(rows)]))


def waiting(*requests) -> list[Waiting]:
    return [Waiting(f"s{place}", request, float(place)) for place, request in enumerate(requests)]


def scheduler(batching=None, step_rows: int = 16, chunk: int = 8, costs: Costs | None = None) -> Scheduler:
    made = Scheduler(batching or Ragged(), step_rows, chunk)
    made.begin(FakeEngine(), costs or Costs())
    return made


def rows_of(plan: Plan) -> dict[str, int]:
    return {each.waiting.session: each.request.rows for each in plan.chosen}


def test_trees_come_in_order_of_arrival_and_none_is_overtaken_by_a_smaller_one():
    plan = scheduler().plan(waiting(tree(6), tree(5), tree(6), tree(1)), 9.0)
    assert rows_of(plan) == {"s0": 6, "s1": 5}


def test_a_tree_of_more_rows_than_a_step_goes_alone():
    assert rows_of(scheduler().plan(waiting(tree(40), tree(1)), 9.0)) == {"s0": 40}


def test_prompts_take_what_trees_leave_and_the_last_chunk_is_cut():
    plan = scheduler().plan(waiting(Prompt(20), tree(5), tree(5)), 9.0)
    assert rows_of(plan) == {"s1": 5, "s2": 5, "s0": 6}
    plan = scheduler().plan(waiting(Prompt(5), Prompt(9), Prompt(9)), 9.0)
    assert rows_of(plan) == {"s0": 5, "s1": 3}  # 8 rows of prompts, although a step has 16


def test_a_chunk_is_never_larger_than_a_step():
    assert rows_of(scheduler(step_rows=4, chunk=8).plan(waiting(Prompt(20)), 9.0)) == {"s0": 4}


def test_while_a_prompt_waits_it_gets_its_share_and_so_do_trees():
    trees = [tree(4) for _ in range(10)]
    plan = scheduler().plan(waiting(*trees, Prompt(20)), 19.0)
    assert rows_of(plan) == {"s0": 4, "s1": 4, "s2": 4, "s10": 4}
    plan = scheduler().plan(waiting(tree(40), Prompt(20)), 9.0)
    assert rows_of(plan) == {"s0": 40, "s1": 4}


def test_a_prompt_that_can_start_from_anothers_chunk_comes_after_it():
    first = Prompt(2)
    second, third = Prompt(2, after=first), Prompt(2)
    plan = scheduler().plan(waiting(first, second, third), 9.0)
    assert rows_of(plan) == {"s0": 2, "s2": 2}
    assert rows_of(scheduler().plan(waiting(second, first), 9.0)) == {"s1": 2}  # in whatever order they ask
    assert rows_of(scheduler().plan(waiting(second, third), 9.0)) == {"s0": 2, "s1": 2}


def test_a_prompt_that_cannot_be_prepared_fails_in_the_pass_and_not_in_the_plan():
    made, broken = scheduler(), Prompt(3)
    broken.broken = True
    plan = made.plan(waiting(tree(3), broken, Prompt(2)), 9.0)
    assert [each.waiting.session for each in plan.chosen] == ["s0", "s1", "s2"]
    with pytest.raises(MemoryError):
        made.compute(plan.chosen)
    assert len(made.compute([plan.chosen[0], plan.chosen[2]])) == 2
    with pytest.raises(MemoryError):
        made.compute([plan.chosen[1]])


def test_passes_of_other_ways_than_ragged_hold_trees_or_prompts_in_turn():
    made = scheduler(EqSpec(8))
    made._batching.compute = Ragged().compute
    kinds = []
    for _ in range(4):
        plan = made.plan(waiting(Prompt(5), tree(3), tree(3)), 9.0)
        kinds.append(sorted(rows_of(plan)))
        made.compute(plan.chosen)
    assert kinds == [["s1", "s2"], ["s0"], ["s1", "s2"], ["s0"]] or kinds == [["s0"], ["s1", "s2"]] * 2


def test_what_is_counted_of_the_passes_is_what_they_were():
    costs = Costs()
    made = scheduler(costs=costs)
    made.compute(made.plan(waiting(tree(3), tree(2)), 9.0).chosen)
    made.compute(made.plan(waiting(tree(1), Prompt(5)), 9.0).chosen)
    counted = made.statistics
    assert (counted.passes, counted.sessions, counted.rows, counted.computed_rows) == (2, 4, 11, 11)
    assert counted.realign_us == 0
    assert counted.longest_wait_us > 0
    assert costs.seen == [5]  # a pass with rows of a prompt tells nothing of trees


def test_padding_counts_as_computed_and_not_as_asked_for():
    costs = Costs()
    made = scheduler(Padded(), costs=costs)
    [first, second] = made.compute(made.plan(waiting(tree(3), tree(2)), 9.0).chosen)
    assert first.share == second.share == (2, 6, 7)
    counted = made.statistics
    assert (counted.rows, counted.computed_rows, counted.realign_us) == (5, 6, 7)
    assert costs.seen == [6]  # a pass takes as long as its rows, padding or not


def test_waiting_lasts_from_the_oldest_request_to_the_begin_of_its_pass(monkeypatch):
    Clock(monkeypatch)
    made = scheduler()
    made.compute([Chosen(Waiting(name, tree(1), since), tree(1)) for name, since in (("a", 98.0), ("b", 99.0))])
    assert (made.statistics.longest_wait_us, made.statistics.pass_us) == (2_000_000, 3_000_000)


def test_every_session_of_a_pass_is_told_the_same_of_it():
    made = scheduler()
    passed = made.compute(made.plan(waiting(tree(3), Prompt(5)), 9.0).chosen)
    assert [each.result.rows for each in passed] == [3, 5]
    assert {each.share for each in passed} == {(2, 8, 0)}


def test_a_pass_waits_for_a_session_that_is_due_and_never_where_it_is_full_or_nobody_is_due():
    made = scheduler(costs=Costs(fixed=0.010))
    now = 100.0
    for _ in range(20):
        made._gathering.go("late", now)
        made._gathering.come("late", now + 0.004)
        now += 1
    made._gathering.go("late", now)
    one = [Waiting("a", tree(3), now)]
    plan = made.plan(one, now)
    assert (plan.chosen, plan.patience) == ((), pytest.approx(0.004, abs=0.0005))
    assert made.plan(one, now + 0.1).patience == 0
    full = [Waiting(name, tree(9), now) for name in "ab"]
    plan = made.plan(full, now)
    assert plan.patience == 0
    assert len(plan.chosen) == 1
    made.forget("late")
    assert made.plan(one, now).patience == 0


def test_a_session_is_away_from_the_end_of_its_pass_on(monkeypatch):
    clock = Clock(monkeypatch)
    made = scheduler(costs=Costs(fixed=10.0))
    for _ in range(2):  # a second after its pass it is here again
        made.compute([Chosen(each, each.request) for each in [Waiting("late", tree(1), clock.now)]])
        clock.now += 1.0
        made.plan([Waiting("late", tree(1), clock.now)], clock.now)
    made.compute([Chosen(each, each.request) for each in [Waiting("late", tree(1), clock.now)]])
    gap, spread = 1.0, 0.375  # what `Gathering` makes of two gaps of a second
    plan = made.plan([Waiting("a", tree(1), clock.now)], clock.now)
    assert plan.patience == pytest.approx(gap + spread)


def test_a_pass_that_fills_up_ends_the_wait_for_it_and_the_next_one_may_wait_again(monkeypatch):
    clock = Clock(monkeypatch)
    made = scheduler(costs=Costs(fixed=2.0))
    made._gathering.go("late", clock.now)
    made._gathering.come("late", clock.now + 1.0)
    made._gathering.go("late", clock.now)
    assert made.plan([Waiting("a", tree(9), clock.now)], clock.now).patience > 0
    full = made.plan([Waiting(name, tree(9), clock.now) for name in "ab"], clock.now)
    assert len(full.chosen) == 1
    made.compute(full.chosen)
    made._gathering.go("late", clock.now)
    assert made.plan([Waiting("b", tree(9), clock.now)], clock.now).patience > 0


def test_the_sessions_that_share_the_model_are_those_in_rounds():
    made = scheduler()
    assert made.sessions == 0
    made.compute([Chosen(each, each.request) for each in waiting(tree(1), tree(1))])
    assert made.sessions == 2
    made.forget("s0")
    made.compute([Chosen(each, each.request) for each in waiting(tree(1))])
    assert made.sessions == 2
    made.forget("s1")
    made.compute([Chosen(each, each.request.chunk(2)) for each in waiting(Prompt(2))])
    assert made.sessions == 1  # who reads its prompt is not in rounds yet


class Asked(NamedTuple):
    """A request that waits: since when, in passes, and behind how many of its kind."""

    request: Segment | Prompt
    place: int
    came: int
    ahead: int


@pytest.mark.parametrize(("batching", "turns"), [(Ragged(), 1), (EqSpec(4), 2)])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_nobody_waits_for_more_passes_than_there_were_others_before_it_whoever_comes_later(batching, turns, data):
    """At any moment anybody may come, with a tree or a prompt. Where kinds take turns it may take twice as many."""
    made = scheduler(batching, step_rows=12, chunk=8)
    held: list[Asked] = []

    def ask(request: Segment | Prompt, passes: int) -> None:
        ahead = sum(type(each.request) is type(request) for each in held)
        held.append(Asked(request, next(places), passes, ahead))

    places = itertools.count()
    for passes in range(25):
        for rows in data.draw(st.lists(st.integers(-14, 14).filter(bool), max_size=4)):
            ask(tree(rows) if rows > 0 else Prompt(-rows), passes)
        if not held:
            continue
        chosen = made.plan([Waiting(each, each.request, float(each.place)) for each in held], 1e6).chosen
        assert chosen
        made._trees_were_last = not chosen[0].request.final
        for each in chosen:
            asked = each.waiting.session
            held.remove(asked)
            assert passes - asked.came <= turns * (asked.ahead + 1)
            if isinstance(asked.request, Prompt) and asked.request.left > each.request.rows:
                asked.request.left -= each.request.rows
                ask(asked.request, passes)
