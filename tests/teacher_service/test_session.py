"""The state machine alone, on the fake engine: no gRPC, no threads."""

import numpy as np
import pytest

from eagle_pangu.speculation.tree import TokenTree
from protos.errors import InvalidFieldError, StaleMessageError
from teacher_service.prefix_cache import PrefixCache
from teacher_service.replies import Verdict
from teacher_service.round import Round
from teacher_service.session import Session
from tests.teacher_service.fakes import (
    CONTEXT_LIMIT,
    FEATURE_WIDTH,
    MARGIN,
    VOCAB_SIZE,
    FakeEngine,
    answer,
    chunks_of,
    drive,
    feature_row,
    next_token,
)
from tests.teacher_service.openings import LIMITS, PROMPT, opening


def opened(chunk: int = 256, **changes) -> tuple[Session, FakeEngine, int]:
    """A session after prefill, its engine, and the first answer token."""
    engine = FakeEngine()
    session = Session(engine, opening(**changes), LIMITS, chunk, PrefixCache(0))
    first = list(chunks_of(engine, session))[-1].first_token
    return session, engine, first.token_id


def ask(session: Session, number: int, committed_length: int, commit: int, tree: TokenTree, epoch: int = 4) -> Verdict:
    message = Round(epoch, number, committed_length, commit, tree)
    stored = session.check(message)
    if stored is not None:
        return stored
    session.commit(message)
    return drive(session._engine, session.verify(message))


def tree_that_accepts(history: list[int], rows: int, accepted: int) -> TokenTree:
    """A chain of `rows` drafted rows under history's last token: right for `accepted` rows, wrong from there on."""
    right = answer(history, rows)
    tokens = [history[-1], *right[:accepted], *((token + 1) % VOCAB_SIZE for token in right[accepted:])]
    return TokenTree.build(tokens, [max(row - 1, 0) for row in range(rows + 1)])


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 100])
def test_chunked_and_whole_prefill_decide_the_same_token_and_send_the_same_features(chunk):
    engine = FakeEngine()
    session = Session(engine, opening(want_features=True), LIMITS, chunk, PrefixCache(0))
    chunks = list(chunks_of(engine, session))
    starts = [chunk.features.start for chunk in chunks]
    rows = [chunk.features.bits for chunk in chunks]
    assert chunks[-1].first_token == (next_token(PROMPT), MARGIN, None)
    assert starts == list(range(0, len(PROMPT), chunk))
    bits = np.concatenate(rows)
    assert bits.dtype == np.uint16
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert values.tolist() == [feature_row(PROMPT[: n + 1]) for n in range(len(PROMPT))]


@pytest.mark.parametrize("accepted", range(6))
def test_a_scripted_tree_forces_any_accepted_length(accepted):
    session, _, first = opened()
    history = [*PROMPT, first]
    verdict = ask(session, 1, len(PROMPT), 0, tree_that_accepts(history, 5, accepted))
    assert verdict.accepted_rows == list(range(1, accepted + 1))
    assert verdict.next_token_id == answer(history, accepted + 1)[-1]
    assert verdict.margins.tolist() == [MARGIN] * (accepted + 1)


def test_the_accepted_path_may_jump_over_rows_of_other_branches():
    session, engine, first = opened()
    one, two, three = answer([*PROMPT, first], 3)
    tree = TokenTree.build([first, one + 1, one, 0, two, two + 1, three], [0, 0, 0, 1, 2, 2, 4])
    verdict = ask(session, 1, len(PROMPT), 0, tree)
    assert verdict.accepted_rows == [2, 4, 6]
    following = ask(session, 2, len(PROMPT) + 4, 3, TokenTree.root_only(verdict.next_token_id))
    assert following.next_token_id == answer(PROMPT, 6)[-1]
    assert engine.slots[0].history == [*PROMPT, first, one, two, three]


@pytest.mark.parametrize("commit", range(4))
def test_the_opener_decides_how_much_of_the_path_is_committed(commit):
    session, engine, first = opened()
    history = [*PROMPT, first]
    ask(session, 1, len(PROMPT), 0, tree_that_accepts(history, 3, 3))
    kept = [*history, *answer(history, commit)]
    root = next_token(kept)
    verdict = ask(session, 2, len(kept), commit, TokenTree.root_only(root))
    assert engine.slots[0].history == kept
    assert verdict.next_token_id == next_token([*kept, root])


def test_features_describe_the_root_and_the_accepted_rows_in_path_order():
    session, _, first = opened(want_features=True)
    history = [*PROMPT, first]
    one, two = answer(history, 2)
    tree = TokenTree.build([first, one + 1, one, two], [0, 0, 0, 2])
    features = ask(session, 1, len(PROMPT), 0, tree).features
    assert features.start == len(PROMPT)
    assert features.bits.shape == (3, FEATURE_WIDTH)
    values = (features.bits.astype(np.uint32) << 16).view(np.float32)
    assert values.tolist() == [feature_row(h) for h in (history, [*history, one], [*history, one, two])]


def test_no_features_are_computed_for_a_session_that_wants_none():
    session, _, first = opened(want_features=False)
    assert ask(session, 1, len(PROMPT), 0, TokenTree.root_only(first)).features is None


def test_a_repeat_is_answered_again_and_does_no_work():
    session, engine, first = opened()
    tree = tree_that_accepts([*PROMPT, first], 4, 2)
    for number, committed, commit in ((1, len(PROMPT), 0), (2, len(PROMPT) + 3, 2)):
        verdict = ask(session, number, committed, commit, tree)
        calls = list(engine.calls)
        assert ask(session, number, committed, commit, tree) is verdict
        assert engine.calls == calls
        tree = tree_that_accepts([*PROMPT, *answer(PROMPT, 4)], 4, 1)
    assert ask(session, 3, len(PROMPT) + 5, 1, TokenTree.root_only(answer(PROMPT, 6)[-1])).accepted_rows == []


FIRST = next_token(PROMPT)
SECOND = answer(PROMPT, 2)[-1]
ROOT = TokenTree.root_only(FIRST)
P = len(PROMPT)

# After one answered round whose verdict accepted two rows; the token that follows both is `NEXT`.
ONE, TWO, NEXT = answer([*PROMPT, FIRST], 3)
AT_NEXT = TokenTree.root_only(NEXT)

STALE = {
    "another epoch": (Round(3, 2, P + 3, 2, AT_NEXT), "epoch"),
    "an older round": (Round(4, 1, P + 3, 2, AT_NEXT), "committed_length"),
    "a round from the future": (Round(4, 3, P + 3, 2, AT_NEXT), "round"),
    "a committed length too small": (Round(4, 2, P + 2, 2, AT_NEXT), "committed_length"),
    "a committed length too large": (Round(4, 2, P + 4, 2, AT_NEXT), "committed_length"),
    "a repeat with another length": (Round(4, 1, P + 1, 0, ROOT), "committed_length"),
}

INVALID = {
    "round zero": (Round(4, 0, P + 3, 2, AT_NEXT), "round", None),
    "more rows committed than accepted": (Round(4, 2, P + 4, 3, AT_NEXT), "commit", None),
    "a repeat with another tree": (Round(4, 1, P, 0, TokenTree.root_only(1)), "tree", None),
    "no root": (Round(4, 2, P + 3, 2, TokenTree.build([], [])), "tree.token_ids", None),
    "another root": (Round(4, 2, P + 3, 2, TokenTree.root_only((NEXT + 1) % VOCAB_SIZE)), "tree.token_ids", 0),
    "the root of a longer commit": (Round(4, 2, P + 2, 1, AT_NEXT), "tree.token_ids", 0),
    "an id past the vocabulary": (
        Round(4, 2, P + 3, 2, TokenTree.build([NEXT, VOCAB_SIZE], [0, 0])),
        "tree.token_ids",
        1,
    ),
    "a parent past the tree": (Round(4, 2, P + 3, 2, TokenTree.build([NEXT, 1, 2], [0, 0, 9])), "tree.parents", 2),
    "a parent that comes later": (Round(4, 2, P + 3, 2, TokenTree.build([NEXT, 1, 2], [0, 2, 0])), "tree.parents", 1),
    "a cycle": (Round(4, 2, P + 3, 2, TokenTree.build([NEXT, 1, 2, 3], [0, 0, 3, 2])), "tree.parents", 2),
    "a row that is its own parent": (Round(4, 2, P + 3, 2, TokenTree.build([NEXT, 1], [0, 1])), "tree.parents", 1),
    "equal siblings": (Round(4, 2, P + 3, 2, TokenTree.build([NEXT, 1, 2, 1], [0, 0, 0, 0])), "tree.token_ids", 3),
    "too many rows": (
        Round(4, 2, P + 3, 2, TokenTree.build([NEXT, *range(9)], [0] * 10)),
        "tree.token_ids",
        None,
    ),
    "too deep": (Round(4, 2, P + 3, 2, TokenTree.build([NEXT] * 8, [0, *range(7)])), "tree.parents", 7),
    "fewer parents than ids": (Round(4, 2, P + 3, 2, TokenTree.build([NEXT, 1], [0])), "tree.parents", None),
    "a score that is not finite": (
        Round(4, 2, P + 3, 2, TokenTree.build([NEXT, 1], [0, 0], [0, float("nan")])),
        "tree.scores",
        1,
    ),
}


def after_one_round() -> tuple[Session, FakeEngine]:
    session, engine, _ = opened()
    assert ask(session, 1, P, 0, TokenTree.build([FIRST, ONE, TWO, 0], [0, 0, 1, 2])).accepted_rows == [1, 2]
    return session, engine


def goes_on(session: Session, engine: FakeEngine, calls: list[str]) -> None:
    assert engine.calls == calls
    assert session.committed_length == P
    verdict = ask(session, 2, P + 3, 2, AT_NEXT)
    assert verdict.next_token_id == answer([*PROMPT, FIRST, ONE, TWO, NEXT], 1)[0]


@pytest.mark.parametrize("name", STALE)
def test_a_stale_message_is_refused_and_leaves_the_state_as_it_was(name):
    message, field = STALE[name]
    session, engine = after_one_round()
    calls = list(engine.calls)
    with pytest.raises(StaleMessageError) as refused:
        session.check(message)
    assert refused.value.field == field
    goes_on(session, engine, calls)


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_message_is_refused_by_field_and_row_and_leaves_the_state_as_it_was(name):
    message, field, row = INVALID[name]
    session, engine = after_one_round()
    calls = list(engine.calls)
    with pytest.raises(InvalidFieldError) as refused:
        session.check(message)
    assert (refused.value.field, refused.value.row) == (field, row)
    goes_on(session, engine, calls)


def test_a_round_older_than_the_last_is_stale():
    session, _ = after_one_round()
    ask(session, 2, P + 3, 2, AT_NEXT)
    with pytest.raises(StaleMessageError, match=r"round: expected 3 \(or 2 again\), got 1"):
        session.check(Round(4, 1, P, 0, ROOT))


def test_nothing_can_be_committed_in_the_first_round():
    session, _, first = opened()
    with pytest.raises(InvalidFieldError, match="commit"):
        session.check(Round(4, 1, P, 1, TokenTree.root_only(first)))
    with pytest.raises(StaleMessageError, match="committed_length"):
        session.check(Round(4, 1, P + 1, 0, TokenTree.root_only(first)))


def test_a_tree_stays_within_the_context_limit():
    prompt = np.arange(CONTEXT_LIMIT - 2) % VOCAB_SIZE
    session, _, first = opened(prompt=prompt)
    chain = TokenTree.build([first, 1, 2], [0, 0, 1])
    with pytest.raises(InvalidFieldError) as refused:
        session.check(Round(4, 1, len(prompt), 0, chain))
    assert (refused.value.field, refused.value.row) == ("tree.parents", 2)
    assert session.check(Round(4, 1, len(prompt), 0, TokenTree.build([first, 1, 2], [0, 0, 0]))) is None


def test_a_tree_stays_within_what_is_left_of_the_slot():
    session, engine, first = opened(max_new_tokens=1, max_rows=3)
    assert engine.slots[0].capacity == P + 4
    root = ask(session, 1, P, 0, TokenTree.root_only(first)).next_token_id
    wide = TokenTree.build([root, 1, 2, 3], [0] * 4)
    with pytest.raises(InvalidFieldError) as refused:
        session.check(Round(4, 2, P + 1, 0, wide))
    assert (refused.value.field, refused.value.row) == ("tree.token_ids", 3)
    assert session.check(Round(4, 2, P + 1, 0, TokenTree.build([root, 1, 2], [0] * 3))) is None
