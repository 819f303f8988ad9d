"""The draw: the very token and margin that the noise of every token would give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from eagle_pangu.speculation import draw as module
from eagle_pangu.speculation.draw import FEW, HIGH_WORD, draw
from eagle_pangu.speculation.noise import from_words, words


def plainly_drawn(scores: NDArray[np.float32], drawn: NDArray[np.uint64]) -> tuple[int, float]:
    perturbed = scores + from_words(drawn)
    best = int(perturbed.argmax())
    return best, float(perturbed[best] - np.delete(perturbed, best).max(initial=-np.inf))


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, 10.0, 1e4, 1e8])
@pytest.mark.parametrize("vocab", [FEW, FEW + 1, 5000, 49_152])
def test_most_of_the_noise_is_never_needed(vocab: int, spread: float) -> None:
    scores = np.random.default_rng(vocab).standard_normal(vocab)
    for position in range(40):
        drawn = words(7, position, vocab)
        for each in (scores, scores.round(1), np.where(scores > 2, scores, -np.inf)):
            row = (spread * each).astype(np.float32) if spread else np.zeros(vocab, np.float32)
            assert draw(row, drawn) == plainly_drawn(row, drawn)


@given(st.data())
def test_any_scores_and_words_give_the_same_token_and_margin(data: st.DataObject) -> None:
    """Words around the bound, and scores a few floats apart from where they decide."""
    vocab = FEW + 1
    seed = data.draw(st.integers(0, 2**32))
    chance = np.random.default_rng(seed)
    near = int(HIGH_WORD) + 2**12 * data.draw(st.integers(-3, 3))
    drawn = np.full(vocab, near, dtype=np.uint64)
    few = chance.choice(vocab, data.draw(st.integers(0, 30)), replace=False)
    drawn[few] = chance.integers(0, 2**64, len(few), dtype=np.uint64)
    scale = np.float32(data.draw(st.sampled_from([1.0, 1e3, 1e8])))
    scores = scale + np.spacing(scale) * chance.integers(-3, 3, vocab).astype(np.float32)
    assert draw(scores, drawn) == plainly_drawn(scores, drawn)


def test_no_lower_word_has_more_noise_than_is_allowed_for() -> None:
    below = np.uint64(HIGH_WORD) - np.arange(1, 2**16, dtype=np.uint64) * np.uint64(2**12)
    assert from_words(below).max() < module._HIGHEST_OF_OTHERS


def test_one_token_alone_has_an_infinite_margin() -> None:
    assert draw(np.zeros(1, np.float32), words(1, 1, 1)) == (0, np.inf)
