"""What is held out, what is trained on, in what order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.training.answers import Answer
from draft_service.training.data import epoch_batches, split
from draft_service.training.settings import TrainingError


def answers(*ids: str, tokens: int = 10) -> list[Answer]:
    return [Answer(id_, True, np.ones(4, np.int32), np.ones(tokens - 4, np.int32)) for id_ in ids]


def names(chosen: list[Answer]) -> set[str]:
    return {answer.id for answer in chosen}


def test_a_twentieth_is_held_out_and_the_parts_are_disjoint() -> None:
    corpus = split(answers(*map(str, range(200))), max_tokens=10_000, seed=0)
    assert (len(corpus.held_out), len(corpus.train)) == (10, 190)
    assert not names(corpus.held_out) & names(corpus.train)
    assert names(corpus.counted) == names(corpus.train)
    assert corpus.sequences == corpus.held_out + corpus.train


def test_the_turns_of_a_conversation_stay_together() -> None:
    corpus = split(answers(*(f"{n}#{turn}" for n in range(40) for turn in range(3))), max_tokens=10_000, seed=0)
    held_out = {answer.conversation for answer in corpus.held_out}
    assert len(corpus.held_out) == 3 * len(held_out) == 6
    assert not held_out & {answer.conversation for answer in corpus.counted}


def test_what_does_not_fit_is_counted_but_not_trained_on() -> None:
    corpus = split(answers(*map(str, range(100))), max_tokens=409, seed=0)
    assert sum(answer.tokens for answer in corpus.sequences) == 400
    assert len(corpus.counted) == 100 - len(corpus.held_out)
    assert not names(corpus.held_out) & names(corpus.counted)


def test_another_seed_holds_out_others() -> None:
    ids = list(map(str, range(100)))
    first, second = (names(split(answers(*ids), max_tokens=10_000, seed=seed).held_out) for seed in (0, 1))
    assert first != second
    assert first == names(split(answers(*ids), max_tokens=10_000, seed=0).held_out)


@pytest.mark.parametrize(("ids", "most"), [(["a"], 100), (["a", "b"], 19)])
def test_one_conversation_is_not_enough(ids: list[str], most: int) -> None:
    with pytest.raises(TrainingError, match="--max-tokens: expected room for two conversations"):
        split(answers(*ids), max_tokens=most, seed=0)


def test_two_conversations_are_one_of_each() -> None:
    corpus = split(answers("a", "b"), max_tokens=20, seed=0)
    assert len(corpus.held_out) == len(corpus.train) == 1


@given(st.lists(st.integers(2, 40), min_size=1, max_size=50), st.integers(1, 60), st.integers(0, 3))
def test_an_epoch_is_every_sequence_once_in_batches_that_fit(lengths: list[int], most: int, epoch: int) -> None:
    batches = epoch_batches(lengths, batch_tokens=most, seed=5, epoch=epoch)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[index] for index in batch) <= most


def test_every_epoch_has_its_own_order() -> None:
    orders = [epoch_batches([1] * 50, batch_tokens=5, seed=0, epoch=epoch) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
