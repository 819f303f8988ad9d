"""Gumbel noise: the same numbers for ever, no two positions alike, and the distribution that it is named for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagle_pangu.speculation.noise import from_words, gumbel

# Written down once. A change here changes the answer to every seeded request.
KNOWN = {
    (0, 0): [-1.49545156955719, -0.3511371314525604, -0.7859067916870117, 0.5586754679679871],
    (1, 0): [-0.1757580041885376, 1.807649850845337, -0.6189814805984497, -1.2442526817321777],
    (0, 1): [-0.06990866363048553, 0.5964654684066772, -0.8943949341773987, 0.7912161350250244],
    (2**64 - 1, 2**32 - 1): [0.016414649784564972, -0.8966024518013, 0.44027256965637207, -0.7840043902397156],
}


@pytest.mark.parametrize(("place", "noise"), KNOWN.items())
def test_the_stream_is_the_one_written_down(place: tuple[int, int], noise: list[float]) -> None:
    drawn = gumbel(*place, vocab_size=4)
    assert drawn.dtype == np.float32
    assert drawn.tolist() == noise


def test_a_token_far_down_the_stream_is_the_one_written_down() -> None:
    assert float(gumbel(7, 600, 49152)[-1]) == -0.1785101592540741


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 1000])
def test_a_tokens_noise_does_not_depend_on_the_vocabulary(vocab_size: int) -> None:
    assert gumbel(5, 9, vocab_size).tolist() == gumbel(5, 9, 4096)[:vocab_size].tolist()


def test_no_noise_comes_twice_in_neighbouring_positions_and_seeds() -> None:
    drawn = np.concatenate([gumbel(seed, position, 64) for seed in range(8) for position in range(8)])
    assert len(np.unique(drawn)) > len(drawn) - 3  # by chance two may agree in float32


def test_the_extreme_words_give_finite_noise() -> None:
    lowest, highest = from_words(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist()
    assert lowest == pytest.approx(-math.log(53 * math.log(2)))
    assert highest == pytest.approx(53 * math.log(2))


def test_the_noise_is_standard_gumbel() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)): the distance stays below its 1e-4 quantile."""
    drawn = np.sort(np.concatenate([gumbel(3, position, 1000) for position in range(50)]).astype(np.float64))
    expected = np.exp(-np.exp(-drawn))
    assert np.abs(expected - (np.arange(len(drawn)) + 0.5) / len(drawn)).max() < 2.23 / math.sqrt(len(drawn))


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_a_seed_or_position_out_of_range_is_refused(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 2\^"):
        gumbel(seed, position, 4)
