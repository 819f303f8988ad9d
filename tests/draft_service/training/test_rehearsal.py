"""Rounds of recorded answers, with drafters that know what they say."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.drafters.base import Budget
from draft_service.drafters.ngram import NgramDrafter
from draft_service.training.answers import Answer
from draft_service.training.rehearsal import Round, accepted_length, figures, rehearse, tokens_per_round
from eagle_pangu.speculation.tree import TokenTree

BUDGET = Budget(rows=4, depth=2)
PROMPT, RESPONSE = [1, 2, 3], list(range(10, 21))
FEATURES = np.arange((len(PROMPT) + len(RESPONSE)) * 2, dtype=np.uint16).reshape(-1, 2)


def answer(prompt: Sequence[int], response: Sequence[int]) -> Answer:
    return Answer("a", True, np.array(prompt, dtype=np.int32), np.array(response, dtype=np.int32))


class Seer:
    """Drafts what comes, as deep as the budget lets it, and checks what it is told before each tree."""

    name = "seer"
    needs_features = True
    context_limit = 0
    identity = None
    shapes = None

    def open(self, prompt: Sequence[int], max_budget: Budget) -> Seer:
        self.tokens, self.described = list(prompt), 0
        return self

    def extend(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        assert start == self.described
        np.testing.assert_array_equal(features, FEATURES[start : start + len(features)])
        self.described += len(features)

    def advance(self) -> Generator[str, str, None]:
        raise AssertionError

    def propose(self, budget: Budget) -> Generator[str, str, TokenTree]:
        assert (yield "a level") == "a level, computed"
        assert self.tokens == (PROMPT + RESPONSE)[: len(self.tokens)]
        assert self.described == len(self.tokens) - 1
        root = self.tokens[-1]
        return TokenTree.build([root, 7, *range(root + 1, root + 1 + budget.depth)], [0, 0, 0, 2])

    def together(self, requests: Sequence[str]) -> int:
        return len(requests)

    def compute(self, requests: Sequence[str]) -> list[str]:
        return [f"{request}, computed" for request in requests]

    def close(self) -> None:
        self.closed = True


def test_a_round_decides_what_was_accepted_and_one_token_more() -> None:
    seer = Seer()
    rounds = rehearse(seer, answer(PROMPT, RESPONSE), FEATURES, BUDGET)
    # One token comes with the prefill, then 3 a round; the last round has one left to say, which is the teacher's.
    assert rounds == [Round(1, 2), Round(4, 2), Round(7, 2), Round(10, 0)]
    assert tokens_per_round(rounds) == 10 / 4
    assert seer.closed


def test_an_answer_of_one_token_takes_no_round() -> None:
    assert rehearse(Seer(), answer(PROMPT, RESPONSE[:1]), FEATURES, BUDGET) == []
    assert tokens_per_round([]) == 0


def test_a_look_up_needs_no_features() -> None:
    prompt = [5, 6, 7, 8, 9, 5]
    rounds = rehearse(NgramDrafter(1, 4, 8), answer(prompt, [6, 7, 8, 9, 3, 3]), FEATURES[:0], BUDGET)
    assert rounds[0] == Round(1, 2)


@pytest.mark.parametrize(("continuation", "length"), [([4, 6, 9], 2), ([5, 4], 1), ([6], 0), ([], 0)])
def test_a_tree_is_accepted_along_the_continuation(continuation: list[int], length: int) -> None:
    tree = TokenTree.build([1, 4, 5, 6], [0, 0, 0, 1])
    assert accepted_length(tree, continuation) == length


def test_figures_are_by_drafter_and_by_where_in_the_answer_a_round_begins() -> None:
    found = figures({"one": [Round(1, 2), Round(63, 0), Round(130, 5)], "none": []})
    assert found["tokens_per_round"] == {"one": 1 + 7 / 3, "none": 0}
    assert found["by_position"] == {"one": [2, 0, 6], "none": []}
