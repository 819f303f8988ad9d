"""When the tokens of an answer came, as its caller saw it, and the quantiles of such times. Plain values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from eagle_pangu.evaluation.records import Answer


class Arrival(NamedTuple):
    """One delta that held tokens: seconds since the request arrived, and how many."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class StreamedAnswer:
    """An answer and the arrivals of its tokens, in order.

    `answer.seconds` counts from the request's arrival too; its finish_reason is "cancelled" where the caller left.
    """

    answer: Answer
    arrivals: tuple[Arrival, ...]

    @property
    def time_to_first_token(self) -> float | None:
        """In seconds; None where the caller left before."""
        return self.arrivals[0].seconds if self.arrivals else None

    @property
    def between_tokens(self) -> list[float]:
        """Seconds between tokens, one entry for every token after the first delta.

        The tokens of a round come in one delta. Each of them counts with the gap to the delta before, divided by the
        tokens of the delta: their mean is the pace at which one can read, and a long gap weighs as many tokens.
        """
        return [
            (later.seconds - earlier.seconds) / later.tokens
            for earlier, later in pairwise(self.arrivals)
            for _ in range(later.tokens)
        ]

    @property
    def longest_wait(self) -> float:
        """Longest time without news in seconds: until the first delta, between two, or until the end."""
        times = [0.0, *(arrival.seconds for arrival in self.arrivals), self.answer.seconds]
        return max(later - earlier for earlier, later in pairwise(times))


class Quantiles(NamedTuple):
    """Of times in milliseconds."""

    p50: float
    p95: float
    p99: float


def quantiles_ms(seconds: Sequence[float]) -> Quantiles | None:
    """Of times in seconds, with interpolation between neighbours; None without any."""
    if not seconds:
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(np.asarray(seconds) * 1000, (50, 95, 99)))
    return Quantiles(p50, p95, p99)
