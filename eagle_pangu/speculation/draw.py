"""The draw itself: which token of a row is the best by score plus noise, and by how much.

Most of the noise is never computed. It rises with the random word that it is made of, so a token whose word is not
among the highest can win only by its score: the best of the tokens with the highest words bounds how low that may be.
What is left out is below the two best, so token and margin are those that all the noise would give.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.noise import from_words

HIGH_WORD = np.uint64(2**64 - 2**64 // 128)
"""One word in 128 is as high: then about as many tokens have one as there are others left to look at."""
_HIGHEST_OF_OTHERS = np.float32(from_words(np.array([HIGH_WORD], dtype=np.uint64))[0] + 1e-3)
"""At least the noise of any lower word: a thousandth is far more than logarithms err by, and costs next to nothing."""
FEW = 1024
"""Tokens whose noise is computed at once."""


class Drawn(NamedTuple):
    """place: of the best token, the first of equal ones; margin: over the next best, infinite where there is none."""

    place: int
    margin: np.float32


def draw(scores: NDArray[np.float32], words: NDArray[np.uint64]) -> Drawn:
    """The token of a row that has the best score plus noise.

    Args:
        scores: [tokens], at least one finite; banned ones are -inf.
        words: [tokens] the random words of their noise.
    """
    places = np.arange(len(scores)) if len(scores) <= FEW else _candidates(scores, words)
    perturbed = scores[places] + from_words(words[places])
    best = int(perturbed.argmax())
    highest = perturbed[best]
    perturbed[best] = -np.inf
    return Drawn(int(places[best]), np.float32(highest - perturbed.max()))


def _candidates(scores: NDArray[np.float32], words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Places of the two best tokens among them, ascending.

    A token with a lower word has a perturbed score of at most its score plus `_HIGHEST_OF_OTHERS`, also as floats:
    rounding keeps order. Where that is below two perturbed scores of tokens with high words, it is not one of the best
    two.
    """
    high = np.flatnonzero(words >= HIGH_WORD)
    second = np.partition(scores[high] + from_words(words[high]), -2)[-2] if len(high) > 1 else np.float32(-np.inf)
    others = np.flatnonzero(scores + _HIGHEST_OF_OTHERS >= second)
    return np.union1d(high, others)
