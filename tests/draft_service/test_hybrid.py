"""The hybrid drafter: how two trees become one, and that the one is legal whatever the two are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.base import Budget, run_alone
from draft_service.drafters.growth import best_subtree
from draft_service.drafters.hybrid import HEAD_TRUST, HybridDrafter, blend
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.registry import DRAFTERS
from draft_service.opening import Opening
from draft_service.session import FeatureRows, Question, Session
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.eagle3.formats import save_head
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.heads import (
    BUDGET,
    BUDGETS,
    CONTEXT,
    FEATURES,
    VOCAB_SIZE,
    RecordingEngine,
    deepest_path,
    drafter_of,
    path,
    poison,
    random_head,
)
from tests.draft_service.heads import open_session as open_head
from tests.draft_service.passes import Alone
from tests.models import tiny_llama
from tests.trees import token_trees

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL_TREES = token_trees(max_rows=8, vocab_size=8, scored=True)
NEVER_SEEN = list(range(30))  # the look-up finds nothing
REPEATING = [*range(100, 112), 50, *range(100, 105)]  # it finds 105, 106, ...


@pytest.fixture(scope="module")
def engine() -> RecordingEngine:
    return RecordingEngine(random_head())


def open_session(engine: RecordingEngine, tokens: list[int], *, features: bool = True) -> Alone:
    drafter = HybridDrafter(drafter_of(engine), 1, 4, 8)
    session = Alone(drafter, drafter.open(tokens, BUDGET))
    poison(session._head)
    if features and len(tokens) > 1:
        session.read_features(0, FEATURES[: len(tokens) - 1])
    return session


def by_path(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Probability of every row, by its path."""
    assert tree.scores is not None
    return {tuple(path(tree, row)): float(np.exp(tree.scores[row])) for row in range(tree.rows)}


def scored(*rows: tuple[int, int, float]) -> TokenTree:
    """A tree from (token, parent, probability), the root added."""
    tokens, parents, probabilities = zip((9, 0, 1.0), *rows, strict=True)
    return TokenTree.build(tokens, parents, np.log(probabilities))


def test_a_row_of_both_is_one_row_and_has_the_mean_of_its_probabilities() -> None:
    head = scored((1, 0, 0.5), (2, 0, 0.25), (3, 1, 0.125))
    matches = scored((1, 0, 0.8), (4, 1, 0.6), (5, 2, 0.4), (2, 0, 0.2), (7, 4, 0.1))
    blended = by_path(blend(head, matches, HEAD_TRUST * 3))
    assert blended == pytest.approx(
        {
            (): 1,
            (1,): (0.5 + 3 * 0.8) / 4,
            (2,): (0.25 + 3 * 0.2) / 4,
            (1, 3): 0.125 / 4,
            (1, 4): 3 * 0.6 / 4,
            (1, 4, 5): 3 * 0.4 / 4,
            (2, 7): 3 * 0.1 / 4,
        }
    )


@given(SMALL_TREES, SMALL_TREES, st.floats(1e-3, 1e6), st.data())
def test_any_best_rows_of_any_blend_are_a_legal_tree(
    head: TokenTree, matches: TokenTree, trust: float, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(0, 30))
    tree = best_subtree(blend(_descending(head), _descending(matches), trust), rows)
    tree.validate(vocab_size=8, max_rows=rows, max_depth=8)


def _descending(tree: TokenTree) -> TokenTree:
    """The tree with scores that fall from parent to child, the root 0 under both."""
    assert tree.scores is not None
    scores = tree.scores.copy()
    for row in range(1, tree.rows):
        scores[row] = scores[tree.parents[row]] + scores[row]
    token_ids = tree.token_ids.copy()
    token_ids[0] = 0
    return TokenTree(token_ids, tree.parents, scores)


def test_without_a_match_the_tree_is_the_heads(engine: RecordingEngine) -> None:
    tree = open_session(engine, NEVER_SEEN).propose(BUDGET)
    assert by_path(tree) == by_path(open_head(engine, NEVER_SEEN).propose(BUDGET))


@pytest.mark.parametrize("reason", ["features missing", "past the head's context"])
def test_where_the_head_has_nothing_to_say_the_tree_is_the_look_ups(engine: RecordingEngine, reason: str) -> None:
    tokens = REPEATING if reason == "features missing" else [*range(CONTEXT), *REPEATING]
    session = open_session(engine, tokens, features=reason != "features missing")
    ngram = NgramDrafter(1, 4, 8)
    tree, alone = session.propose(BUDGET), run_alone(ngram, ngram.open(tokens, BUDGET).propose(BUDGET))
    assert tree.token_ids.tolist() == alone.token_ids.tolist() == [104, 105, 106, 107, 108, 109]
    assert tree.parents.tolist() == alone.parents.tolist()


def test_a_long_match_leads_and_the_head_fills_the_rest(engine: RecordingEngine) -> None:
    session = open_session(engine, REPEATING)
    tree = session.propose(BUDGET)
    assert tree.drafted == BUDGET.rows
    rows = by_path(tree)
    assert (105, 106, 107, 108, 109) in rows
    candidates = run_alone(session.drafter, session._head.candidates(BUDGET))
    head = {tuple(path(candidates, row)) for row in range(5)}
    assert head & rows.keys() > {()}


def test_a_match_of_two_tokens_stands_behind_a_sure_head_and_one_of_four_before_it(engine: RecordingEngine) -> None:
    head = scored((1, 0, 0.9))
    assert best_subtree(blend(head, scored((2, 0, 0.8)), 16), 1).token_ids.tolist() == [9, 1]
    assert best_subtree(blend(head, scored((2, 0, 0.8)), 256), 1).token_ids.tolist() == [9, 2]


def test_rows_of_the_look_up_cost_no_pass(engine: RecordingEngine) -> None:
    head = open_head(engine, REPEATING)
    engine.passes.clear()
    head.propose(Budget(rows=2, depth=10))
    alone = list(engine.passes)
    engine.passes.clear()
    tree = open_session(engine, REPEATING).propose(Budget(rows=2, depth=10))
    assert tree.token_ids.tolist() == [104, 105, 106]
    assert engine.passes == alone


def test_asking_again_gives_the_same_tree(engine: RecordingEngine) -> None:
    session = open_session(engine, REPEATING)
    first, second = session.propose(BUDGET), session.propose(BUDGET)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert by_path(first) == by_path(second)


@given(BUDGETS, st.lists(st.integers(0, 5), min_size=1, max_size=40), st.lists(st.integers(0, 9), max_size=3))
@settings(max_examples=40)
def test_every_tree_keeps_the_rules_and_the_budget(
    engine: RecordingEngine, budget: Budget, tokens: list[int], accepted_lengths: list[int]
) -> None:
    session = open_session(engine, tokens)
    for accepted in [*accepted_lengths, 0]:
        tree = session.propose(budget)
        tree.validate(vocab_size=VOCAB_SIZE, max_rows=budget.rows, max_depth=budget.depth)
        assert tree.token_ids[0] == tokens[-1]
        poison(session._head)
        appended = [*deepest_path(tree)[:accepted], 3]
        session.read_features(len(tokens) - 1, FEATURES[len(tokens) - 1 : len(tokens) - 1 + len(appended)])
        session.extend(appended)
        tokens = tokens + appended


def test_a_session_of_the_service_reads_features_and_drafts_on(engine: RecordingEngine) -> None:
    drafter = HybridDrafter(drafter_of(engine), 1, 4, 8)
    opening = Opening(1, "request", "hybrid", REPEATING, BUDGET, VOCAB_SIZE, CONTEXT, engine.feature_width)
    session = Session(opening, drafter.open(REPEATING, BUDGET), reads_features=drafter.needs_features)
    session.read_features(FeatureRows(0, FEATURES[: len(REPEATING)]))
    run_alone(drafter, session.advance())
    length = len(REPEATING)
    tree = run_alone(drafter, session.propose(Question(1, length, [105], BUDGET)))
    fresh = open_session(engine, [*REPEATING, 105]).propose(BUDGET)
    assert by_path(tree) == pytest.approx(by_path(fresh), abs=1e-5)
    appended = [*deepest_path(tree), 1]
    features = FeatureRows(length, FEATURES[length : length + len(appended)])
    tree = run_alone(drafter, session.propose(Question(2, length + len(appended), appended, BUDGET), [features]))
    fresh = open_session(engine, [*REPEATING, 105, *appended]).propose(BUDGET)
    assert by_path(tree) == pytest.approx(by_path(fresh), abs=1e-5)


def test_it_is_loaded_by_name_with_the_settings_of_both(tmp_path: Path) -> None:
    teacher = tiny_llama(tmp_path / "teacher")
    head = random_head(hidden_size=64, target_hidden_size=64, vocab_size=260)
    save_head(head, tmp_path / "head", torch_dtype=torch.float32)
    drafter = DRAFTERS["hybrid"](
        DraftSettings(head=str(tmp_path / "head"), embeddings=str(teacher), ngram_min=2, ngram_max=3, ngram_matches=1)
    )
    assert (drafter.name, drafter.needs_features, drafter.context_limit) == ("hybrid", True, 0)
    assert drafter.identity is not None
    assert drafter.identity.feature_width == 192
    session = drafter.open([7, 1, 8, 5, 7, 1, 9, 5, 7, 1], BUDGET)
    assert run_alone(drafter, session.propose(Budget(8, 2))).token_ids.tolist() == [1, 9, 5]
