"""The EAGLE-3 drafter against the same unroll without cache or tree, on random heads."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from draft_service.drafters.base import Budget, run_alone
from draft_service.drafters.eagle3 import CATCH_UP_ROWS
from draft_service.messages import require_same_ids
from draft_service.opening import Opening
from draft_service.session import FeatureRows, Question, Session
from eagle_pangu.serving.errors import FailedPreconditionError
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from eagle_pangu.speculation.tree import TokenTree
from protos.errors import InvalidFieldError
from protos.v1 import model_pb2
from tests.draft_service.heads import (
    BUDGET,
    CONTEXT,
    FEATURES,
    IDENTITY,
    PROMPT,
    VOCAB_SIZE,
    RecordingEngine,
    assert_same,
    deepest_path,
    drafter_of,
    expected_score,
    next_logits,
    open_session,
    path,
    poison,
    random_head,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_scores(head: Eagle3Head, tree: TokenTree, tokens: list[int], window: int = 0) -> None:
    """Every row has the score that the oracle gives to its path."""
    tree.validate(vocab_size=VOCAB_SIZE, max_rows=BUDGET.rows, max_depth=BUDGET.depth)
    assert tree.drafted == BUDGET.rows
    assert tree.scores is not None
    for row in range(1, tree.rows):
        expected = expected_score(head, tokens, FEATURES, path(tree, row), window)
        assert tree.scores[row] == pytest.approx(expected, abs=1e-4)


VARIANTS = {
    "as published": {},
    "recycles normed": {"recycles_normed": True},
    "norms everywhere": {"feature_norm": "each", "norm_before_residual": True},
    "one query head a KV head": {"key_value_heads": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_over_rounds_of_every_accepted_length_cached_logits_are_those_of_the_whole_unroll(variant: str) -> None:
    head = random_head(**VARIANTS[variant])
    engine = RecordingEngine(head)
    session = open_session(engine, PROMPT, width=1, features=False)
    for start in (0, 7, 23):  # in chunks, some with work between
        session.read_features(start, FEATURES[start : {0: 7, 7: 23, 23: len(PROMPT) - 1}[start]])
        session.advance()
    tokens = list(PROMPT)
    for accepted in (0, 3, BUDGET.depth, 1, 4, 0, 0, 2):
        engine.logits.clear()
        tree = session.propose(BUDGET)
        drafted = deepest_path(tree)
        assert len(drafted) == BUDGET.depth
        expected = torch.stack(next_logits(head, tokens, FEATURES, drafted[:-1]))
        torch.testing.assert_close(torch.cat(engine.logits), expected, atol=1e-4, rtol=0)
        assert tree.token_ids[1:].tolist() == head.target_ids[expected.argmax(-1)].tolist()
        poison(session)
        appended = [*drafted[:accepted], 7]
        session.read_features(len(tokens) - 1, FEATURES[len(tokens) - 1 : len(tokens) + accepted])
        session.extend(appended)
        tokens += appended


def test_every_row_of_a_tree_has_the_score_of_its_path_round_after_round(
    engine: RecordingEngine, head: Eagle3Head
) -> None:
    session, tokens = open_session(engine, PROMPT), list(PROMPT)
    for accepted in (2, 0, 5, 1):
        tree = session.propose(BUDGET)
        assert_scores(head, tree, tokens)
        poison(session)
        appended = [*deepest_path(tree)[:accepted], 3]
        session.read_features(len(tokens) - 1, FEATURES[len(tokens) - 1 : len(tokens) - 1 + len(appended)])
        session.extend(appended)
        tokens += appended


def test_no_better_token_is_left_out_at_the_first_level(engine: RecordingEngine, head: Eagle3Head) -> None:
    tree = open_session(engine, PROMPT).propose(Budget(rows=4, depth=1))
    best = next_logits(head, PROMPT, FEATURES)[0].topk(4).indices
    assert tree.token_ids[1:].tolist() == head.target_ids[best].tolist()
    assert engine.passes == [len(PROMPT) - 2, 1]


def test_accepted_rows_are_run_again_with_features_and_rows_with_features_once(engine: RecordingEngine) -> None:
    session = open_session(engine, PROMPT)
    session.advance()
    assert engine.passes == [len(PROMPT) - 2]
    tree = session.propose(BUDGET)
    assert engine.passes[1] == 1
    for rows in engine.passes[2:]:
        assert 1 <= rows <= 4
    accepted = deepest_path(tree)
    session.read_features(len(PROMPT) - 1, FEATURES[len(PROMPT) - 1 : len(PROMPT) + len(accepted)])
    session.extend([*accepted, 7])
    engine.passes.clear()
    session.propose(BUDGET)
    assert engine.passes[0] == len(accepted) + 1


def test_features_may_run_ahead_of_the_tokens_they_describe(engine: RecordingEngine) -> None:
    session, tokens = open_session(engine, PROMPT[:20], features=False), PROMPT[:20]
    session.read_features(0, FEATURES[:35])
    session.advance()
    for appended in (PROMPT[20:21], PROMPT[21:34]):
        session.extend(appended)
        tokens = tokens + appended
        assert_same(session.propose(BUDGET), open_session(engine, tokens).propose(BUDGET))


@pytest.mark.parametrize("missing", [1, 2, CATCH_UP_ROWS + 5])
def test_without_the_features_before_the_root_it_stands_alone_until_they_come(
    engine: RecordingEngine, missing: int
) -> None:
    session = open_session(engine, PROMPT, features=False)
    known = len(PROMPT) - 1 - missing
    session.read_features(0, FEATURES[:known])
    session.advance()
    engine.passes.clear()
    with capture_logs() as logs:
        assert session.propose(BUDGET).token_ids.tolist() == [PROMPT[-1]]
        session.extend([5])
        assert session.propose(BUDGET).token_ids.tolist() == [5]
    assert engine.passes == []
    assert [entry["event"] for entry in logs] == ["features missing"]
    session.read_features(known, FEATURES[known : len(PROMPT)])
    assert_same(session.propose(BUDGET), open_session(engine, [*PROMPT, 5]).propose(BUDGET))


def test_a_sequence_of_one_token_has_no_row_to_run(engine: RecordingEngine) -> None:
    session = open_session(engine, PROMPT[:1])
    assert session.propose(BUDGET).token_ids.tolist() == PROMPT[:1]
    session.read_features(0, FEATURES[:1])
    session.extend([9])
    assert_same(session.propose(BUDGET), open_session(engine, [PROMPT[0], 9]).propose(BUDGET))


def test_tokens_decided_without_a_draft_are_caught_up_with(engine: RecordingEngine) -> None:
    session, tokens = open_session(engine, PROMPT), list(PROMPT)
    session.propose(BUDGET)
    for count in (1, CATCH_UP_ROWS, CATCH_UP_ROWS + 1, 30):
        session.read_features(len(tokens) - 1, FEATURES[len(tokens) - 1 : len(tokens) - 1 + count])
        session.extend(list(range(count)))
        tokens.extend(range(count))
        poison(session)
        assert_same(session.propose(BUDGET), open_session(engine, tokens).propose(BUDGET))


def test_a_long_prompt_is_read_chunk_by_chunk(head: Eagle3Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.drafters.eagle3.CHUNK", 16)
    engine = RecordingEngine(head)
    session = open_session(engine, PROMPT)
    session.advance()
    assert engine.passes == [16, 16]
    assert_scores(head, session.propose(BUDGET), PROMPT)
    assert engine.passes[2] == len(PROMPT) - 1 - 32


@pytest.mark.parametrize("window", [1, 2, 5, 17, 40])
def test_with_a_window_a_row_sees_only_the_last_rows_of_its_path(head: Eagle3Head, window: int) -> None:
    engine = RecordingEngine(head, window=window)
    assert_scores(head, open_session(engine, PROMPT).propose(BUDGET), PROMPT, window)


def test_a_window_as_long_as_the_sequence_is_none(engine: RecordingEngine, head: Eagle3Head) -> None:
    windowed = open_session(RecordingEngine(head, window=CONTEXT), PROMPT).propose(BUDGET)
    assert_same(windowed, open_session(engine, PROMPT).propose(BUDGET))


def test_asking_again_gives_the_same_tree_to_the_bit(engine: RecordingEngine) -> None:
    session = open_session(engine, PROMPT)
    trees = [session.propose(BUDGET)]
    session.propose(Budget(rows=3, depth=2))
    trees += [session.propose(BUDGET), open_session(engine, PROMPT).propose(BUDGET)]
    for tree in trees[1:]:
        assert tree.token_ids.tolist() == trees[0].token_ids.tolist()
        assert tree.parents.tolist() == trees[0].parents.tolist()
        assert tree.scores is not None
        assert trees[0].scores is not None
        assert tree.scores.tolist() == trees[0].scores.tolist()


def test_a_session_of_the_service_drafts_through_rounds_late_and_repeated_features(
    engine: RecordingEngine, head: Eagle3Head
) -> None:
    opening = Opening(1, "request", "eagle3", PROMPT, BUDGET, VOCAB_SIZE, CONTEXT, engine.feature_width)
    drafter = drafter_of(engine)
    session = Session(opening, drafter.open(PROMPT, BUDGET), reads_features=True)
    session.read_features(FeatureRows(0, FEATURES[:25]))
    session.read_features(FeatureRows(20, FEATURES[20 : len(PROMPT)]))
    run_alone(drafter, session.advance())
    tokens = [*PROMPT, 4]
    tree = run_alone(drafter, session.propose(Question(1, len(PROMPT), [4], BUDGET)))
    assert_scores(head, tree, tokens)
    assert run_alone(drafter, session.propose(Question(1, len(PROMPT), [4], BUDGET))) is tree
    with pytest.raises(InvalidFieldError, match=r"features\.start"):
        session.read_features(FeatureRows(len(PROMPT) + 1, FEATURES[:1]))
    appended = [*deepest_path(tree)[:2], 5]
    late = run_alone(drafter, session.propose(Question(2, len(tokens) + 2, appended, BUDGET)))
    assert late.token_ids.tolist() == [5]
    tokens += appended
    session.read_features(FeatureRows(len(PROMPT) - 3, FEATURES[len(PROMPT) - 3 : len(tokens)]))
    tokens.append(6)
    assert_scores(head, run_alone(drafter, session.propose(Question(3, len(tokens) - 1, [6], BUDGET))), tokens)


def test_a_teacher_of_another_feature_width_is_refused_with_both_sides_named() -> None:
    teacher = model_pb2.ModelFingerprint(
        model="big", tokenizer_sha256="ab" * 32, vocab_size=VOCAB_SIZE, eos_token_ids=[0], feature_width=96
    )
    with pytest.raises(FailedPreconditionError, match=r"'head for teacher'.*'big'.*feature_width: 72 / 96"):
        require_same_ids(IDENTITY, teacher)
    teacher.feature_width = 72
    require_same_ids(IDENTITY, teacher)
    teacher.feature_width = 96
    require_same_ids(IDENTITY._replace(feature_width=0), teacher)
