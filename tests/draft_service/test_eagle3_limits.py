"""The EAGLE-3 drafter's limits: budgets, the slot, the context, ids, and heads that say nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.base import Budget, run_alone
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from tests.draft_service.heads import (
    BUDGET,
    BUDGETS,
    CONTEXT,
    DRAFT_IDS,
    FEATURES,
    PROMPT,
    VOCAB_SIZE,
    RecordingEngine,
    deepest_path,
    drafter_of,
    open_session,
    poison,
    random_head,
)
from tests.draft_service.passes import Alone

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("budget", [Budget(0, 5), Budget(5, 0)])
def test_an_empty_budget_gives_the_root_alone_and_costs_no_pass(engine: RecordingEngine, budget: Budget) -> None:
    assert open_session(engine, PROMPT).propose(budget).token_ids.tolist() == [PROMPT[-1]]
    assert engine.passes == []


@pytest.mark.parametrize(("least", "share", "deep"), [(1e-9, 1.0, True), (1.1, 1.0, False), (1e-9, 1e-12, False)])
def test_a_level_that_can_bring_little_is_not_run(
    engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch, least: float, share: float, deep: bool
) -> None:
    """A frontier's scores say how far the sequence goes through it, never more than once; the head's weight counts."""
    monkeypatch.setattr("draft_service.drafters.eagle3.LEAST_GAIN", least)
    session = open_session(engine, PROMPT)
    candidates = run_alone(session.drafter, session.candidates(BUDGET, share))
    assert (candidates.depth.max() > 1) == deep
    assert (len(engine.passes) > 2) == deep


@pytest.fixture(scope="module")
def shared(head: Eagle3Head) -> RecordingEngine:
    """For tests that do not ask what passes were run."""
    return RecordingEngine(head)


@given(BUDGETS, st.integers(1, 6), st.integers(2, 40), st.lists(st.integers(0, 9), max_size=3))
@settings(max_examples=40)
def test_every_tree_keeps_the_rules_and_the_budget(
    shared: RecordingEngine, budget: Budget, width: int, length: int, accepted_lengths: list[int]
) -> None:
    tokens = PROMPT[:length]
    session = open_session(shared, tokens, width)
    for accepted in [*accepted_lengths, 0]:
        tree = session.propose(budget)
        tree.validate(vocab_size=VOCAB_SIZE, max_rows=budget.rows, max_depth=budget.depth)
        assert tree.scores is not None
        assert (tree.scores <= tree.scores[tree.parents]).all()
        poison(session)
        appended = [*deepest_path(tree)[:accepted], 3]
        session.read_features(len(tokens) - 1, FEATURES[len(tokens) - 1 : len(tokens) - 1 + len(appended)])
        session.extend(appended)
        tokens = tokens + appended


@pytest.mark.parametrize(("capacity", "limit"), [(512, CONTEXT), (96, 96)])
def test_the_context_limit_is_the_smaller_of_the_heads_and_the_slots_and_no_row_passes_it(
    head: Eagle3Head, capacity: int, limit: int
) -> None:
    engine = RecordingEngine(head, slot_capacity=capacity)
    drafter = drafter_of(engine, width=1)
    assert drafter.context_limit == limit
    session, length = Alone(drafter, drafter.open(PROMPT, BUDGET)), len(PROMPT)
    while length < limit + 7:
        known = session._features_end
        session.read_features(known, FEATURES[known : length - 1])
        assert session.propose(BUDGET).drafted == max(0, min(BUDGET.depth, limit - length))
        session.extend([1, 2, 3])
        length += 3
    assert len(session._features) + session._slot.committed_length == limit


@pytest.mark.parametrize("length", range(CONTEXT - 8, CONTEXT + 1))
def test_a_branch_that_does_not_fit_the_slot_ends_early(shared: RecordingEngine, length: int) -> None:
    tree = open_session(shared, [7] * length).propose(BUDGET)
    tree.validate(vocab_size=VOCAB_SIZE, max_rows=BUDGET.rows, max_depth=min(BUDGET.depth, CONTEXT - length))
    assert (tree.drafted > 0) == (length < CONTEXT)


def test_past_the_context_limit_no_work_is_done(engine: RecordingEngine) -> None:
    session = open_session(engine, [7] * (CONTEXT + 20))
    session.advance()
    assert session.propose(BUDGET).token_ids.tolist() == [7]
    assert engine.passes == []


def test_ids_past_the_teachers_last_one_are_never_proposed(head: Eagle3Head) -> None:
    known = int(head.target_ids[DRAFT_IDS // 2])
    engine = RecordingEngine(head, vocab_size=known)
    tree = open_session(engine, [token % known for token in PROMPT], width=64).propose(Budget(rows=24, depth=1))
    assert tree.drafted == 24
    assert tree.token_ids.max() < known


def test_no_probability_anywhere_gives_the_root_alone(head: Eagle3Head) -> None:
    session = open_session(RecordingEngine(head), PROMPT, features=False)
    session.read_features(0, np.full((len(PROMPT), 72), 0x7FC0, dtype=np.uint16))  # NaN
    assert session.propose(BUDGET).token_ids.tolist() == [PROMPT[-1]]


def test_in_bfloat16_trees_keep_the_rules_too() -> None:
    session = open_session(RecordingEngine(random_head().bfloat16()), PROMPT)
    tree = session.propose(BUDGET)
    tree.validate(vocab_size=VOCAB_SIZE, max_rows=BUDGET.rows, max_depth=BUDGET.depth)
    assert tree.drafted == BUDGET.rows
