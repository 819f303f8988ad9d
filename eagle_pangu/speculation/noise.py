"""The noise of seeded sampling: standard Gumbel variates that depend on seed, position and token id alone.

By the Gumbel-max trick `argmax(logits + noise)` is a draw from `softmax(logits)`, so a draw at a position is the same
whatever was computed beside it. Counter-based (Philox4x64-10; Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011): no state, no order of calls. NumPy only; it knows neither logits nor trees.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def gumbel(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """Noise of one position, [vocab_size] float32; arguments and errors as for `words`."""
    return from_words(words(seed, position, vocab_size))


def words(seed: int, position: int, vocab_size: int) -> NDArray[np.uint64]:
    """Random words of one position, [vocab_size]; token v's does not depend on vocab_size.

    Args:
        seed: in [0, 2^64); the key of the generator.
        position: in [0, 2^32); the highest word of its counter, so no two positions share a block.
        vocab_size: ids to draw for; token v takes word v of the stream.

    Raises:
        ValueError: seed or position is out of range.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"expected a seed in [0, 2^64), got {seed}")
    if not 0 <= position < 2**32:
        raise ValueError(f"expected a position in [0, 2^32), got {position}")
    return np.random.Philox(key=seed, counter=position << 192).random_raw(vocab_size)


def from_words(drawn: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Noise from random words: -log(-log(u)), u = (their top 52 bits + 1/2) / 2^52.

    Not 53 bits: the half would then be rounded away above 2^52, and u could become 1.
    """
    uniform = (drawn >> np.uint64(12)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    exponential = np.negative(np.log(uniform, out=uniform), out=uniform)
    return np.negative(np.log(exponential, out=exponential)).astype(np.float32)
