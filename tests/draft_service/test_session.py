"""The state machine of one session, around a scripted drafter."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.drafters.base import Budget
from draft_service.opening import Opening
from draft_service.session import FeatureRows, Question, Session
from eagle_pangu.speculation.tree import TokenTree
from protos.errors import InvalidFieldError, StaleMessageError

PROMPT = [1, 2, 3]
BUDGET = Budget(4, 4)


class ScriptedDraft:
    """Remembers what it was told; proposes the root alone."""

    def __init__(self) -> None:
        self.tokens = list(PROMPT)
        self.features: list[tuple[int, list[int]]] = []
        self.proposals = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        self.features.append((start, features[:, 0].tolist()))

    def advance(self) -> Generator[str, str, None]:
        yield from ()

    def propose(self, budget: Budget) -> Generator[str, str, TokenTree]:
        assert (yield "a level") == "computed"
        self.proposals += 1
        return TokenTree.root_only(self.tokens[-1])

    def close(self) -> None: ...


def opening(**changes: object) -> Opening:
    values: dict[str, object] = {
        "epoch": 5,
        "request_id": "request",
        "drafter": "scripted",
        "prompt": PROMPT,
        "max_budget": BUDGET,
        "vocab_size": 100,
        "context_limit": 20,
        "feature_width": 2,
    }
    return Opening(**{**values, **changes})  # type: ignore[arg-type]


def question(
    round_number: int = 1, length: int = 3, appended: Sequence[int] = (7,), budget: Budget = BUDGET
) -> Question:
    return Question(round_number, length, list(appended), budget)


def ask(session: Session, asked: Question, features: Sequence[FeatureRows] = ()) -> TokenTree:
    """The answer, whatever passes it takes."""
    work = session.propose(asked, features)
    outcome = None
    while True:
        try:
            assert work.send(outcome) == "a level"
        except StopIteration as finished:
            return finished.value
        outcome = "computed"


@pytest.fixture
def draft() -> ScriptedDraft:
    return ScriptedDraft()


@pytest.fixture
def session(draft: ScriptedDraft) -> Session:
    return Session(opening(), draft, reads_features=True)


def test_each_round_appends_its_tokens_and_roots_its_tree_at_the_last_one(
    session: Session, draft: ScriptedDraft
) -> None:
    assert ask(session, question()).token_ids.tolist() == [7]
    assert ask(session, question(2, 5, [8, 9])).token_ids.tolist() == [9]
    assert draft.tokens == [1, 2, 3, 7, 8, 9]
    assert (session.round, session.length) == (2, 6)


def test_a_repeat_of_the_last_round_gets_the_same_tree_without_new_work(session: Session, draft: ScriptedDraft) -> None:
    first = ask(session, question())
    assert ask(session, question()) is first
    assert draft.proposals == 1
    assert session.length == 4


def test_a_round_that_was_never_heard_of_may_be_skipped(session: Session) -> None:
    ask(session, question())
    assert ask(session, question(4, 5, [8, 9])).token_ids.tolist() == [9]


STALE: dict[str, tuple[Question, str]] = {
    "an older round": (question(1), "round"),
    "another length in a repeat": (question(2, 5, [8]), "committed_length"),
    "a length that misses tokens": (question(3, 6, [8]), "committed_length"),
    "a length that counts the root": (question(3, 5 + 1, [9]), "committed_length"),
}
INVALID: dict[str, tuple[Question, str, int | None]] = {
    "no round": (question(0, 5, [9]), "round", None),
    "a repeat of other tokens": (question(2, 4, [9]), "appended_token_ids", None),
    "a repeat of another budget": (question(2, 4, [8], Budget(1, 1)), "appended_token_ids", None),
    "nothing appended": (question(3, 4, []), "appended_token_ids", None),
    "an id past the vocabulary": (question(3, 6, [9, 100]), "appended_token_ids", 1),
    "too many rows": (question(3, 5, [9], Budget(5, 4)), "budget.rows", None),
    "too much depth": (question(3, 5, [9], Budget(4, 5)), "budget.depth", None),
    "a sequence past the context limit": (question(3, 20, [9] * 16), "appended_token_ids", None),
}


@pytest.mark.parametrize("case", [*STALE, *INVALID])
def test_a_refused_question_names_its_field_and_changes_nothing(
    session: Session, draft: ScriptedDraft, case: str
) -> None:
    ask(session, question())
    ask(session, question(2, 4, [8]))
    if case in STALE:
        wrong, field = STALE[case]
        with pytest.raises(StaleMessageError) as stale:
            ask(session, wrong)
        assert stale.value.field == field
    else:
        wrong, field, row = INVALID[case]
        with pytest.raises(InvalidFieldError) as invalid:
            ask(session, wrong)
        assert (invalid.value.field, invalid.value.row) == (field, row)
    assert draft.tokens == [1, 2, 3, 7, 8]
    assert ask(session, question(3, 5, [9])).token_ids.tolist() == [9]


def test_a_message_of_another_epoch_is_stale(session: Session) -> None:
    session.check_epoch(5)
    with pytest.raises(StaleMessageError, match="epoch: expected 5, got 6"):
        session.check_epoch(6)


def rows(start: int, *values: int) -> FeatureRows:
    return FeatureRows(start, np.array([[value, value] for value in values], dtype=np.uint16))


def test_features_arrive_in_order_and_what_came_before_is_skipped(session: Session, draft: ScriptedDraft) -> None:
    session.read_features(rows(0, 10, 11))
    session.read_features(rows(2, 12))
    session.read_features(rows(1, 11, 12))
    session.read_features(rows(1, 11, 12, 13))
    assert draft.features == [(0, [10, 11]), (2, [12]), (3, [13])]


@pytest.mark.parametrize(("start", "count", "field"), [(1, 1, "features.start"), (0, 21, "features.count")])
def test_features_with_a_gap_or_past_the_context_are_refused(
    session: Session, draft: ScriptedDraft, start: int, count: int, field: str
) -> None:
    with pytest.raises(InvalidFieldError) as invalid:
        session.read_features(rows(start, *range(count)))
    assert invalid.value.field == field
    session.read_features(rows(0, 10))
    assert draft.features == [(0, [10])]


def test_a_drafter_that_reads_no_features_is_given_none(draft: ScriptedDraft) -> None:
    Session(opening(), draft, reads_features=False).read_features(rows(0, 10))
    assert draft.features == []


def test_features_that_come_with_a_question_are_read_before_the_tree(session: Session, draft: ScriptedDraft) -> None:
    session.read_features(rows(0, 10, 11))
    ask(session, question(), [rows(1, 11, 12), rows(3, 13)])
    ask(session, question(), [rows(1, 11, 12), rows(3, 13)])  # a repeat
    assert draft.features == [(0, [10, 11]), (2, [12]), (3, [13])]


def test_a_question_with_bad_features_changes_nothing(session: Session, draft: ScriptedDraft) -> None:
    with pytest.raises(InvalidFieldError, match=r"features\.start: expected at most 2, got 3"):
        ask(session, question(), [rows(0, 10, 11), rows(3, 13)])
    assert (draft.features, draft.tokens, draft.proposals) == ([], PROMPT, 0)
    with pytest.raises(InvalidFieldError, match="budget"):
        ask(session, question(budget=Budget(5, 1)), [rows(0, 10, 11)])
    assert draft.features == []


BAD_OPENINGS: dict[str, tuple[dict[str, object], str, int | None]] = {
    "no request id": ({"request_id": ""}, "open.request_id", None),
    "a request id too long": ({"request_id": "x" * 129}, "open.request_id", None),
    "a request id that does not print": ({"request_id": "a\nb"}, "open.request_id", None),
    "no prompt": ({"prompt": []}, "open.prompt_token_ids", None),
    "a prompt past the context limit": ({"prompt": [1] * 21}, "open.prompt_token_ids", None),
    "an id past the vocabulary": ({"prompt": [1, 99, 100, 101]}, "open.prompt_token_ids", 2),
    "too many rows": ({"max_budget": Budget(9, 1)}, "open.max_budget.rows", None),
    "too much depth": ({"max_budget": Budget(1, 9)}, "open.max_budget.depth", None),
}


@pytest.mark.parametrize("case", BAD_OPENINGS)
def test_a_bad_opening_names_its_field(case: str) -> None:
    changes, field, row = BAD_OPENINGS[case]
    with pytest.raises(InvalidFieldError) as invalid:
        opening(**changes).validate(Budget(8, 8))
    assert (invalid.value.field, invalid.value.row) == (field, row)


def test_an_opening_at_every_limit_is_fine() -> None:
    opening(prompt=[99] * 20, max_budget=Budget(8, 8), request_id="x" * 128).validate(Budget(8, 8))
