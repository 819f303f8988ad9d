"""The times of an answer's tokens, from arrivals written by hand."""

from __future__ import annotations

import pytest

from eagle_pangu.evaluation.latency import Arrival, StreamedAnswer, quantiles_ms
from eagle_pangu.evaluation.records import Answer


def streamed(*arrivals: tuple[float, int], seconds: float) -> StreamedAnswer:
    tokens = sum(count for _, count in arrivals)
    answer = Answer(tuple(range(tokens)), "", "length", seconds, prompt_tokens=1)
    return StreamedAnswer(answer, tuple(Arrival(*arrival) for arrival in arrivals))


def test_the_tokens_of_a_delta_share_the_gap_before_it() -> None:
    answer = streamed((1.0, 3), (1.6, 2), (2.0, 1), seconds=2.0)
    assert answer.time_to_first_token == 1.0
    assert answer.between_tokens == pytest.approx([0.3, 0.3, 0.4])
    assert answer.longest_wait == 1.0


def test_the_longest_wait_may_lie_between_two_deltas_or_before_the_caller_left() -> None:
    assert streamed((1.0, 1), (4.0, 1), seconds=4.0).longest_wait == 3.0
    assert streamed((1.0, 1), seconds=6.0).longest_wait == 5.0
    nothing = streamed(seconds=2.0)
    assert (nothing.time_to_first_token, nothing.between_tokens, nothing.longest_wait) == (None, [], 2.0)


def test_quantiles_are_in_milliseconds_and_none_without_a_time() -> None:
    assert quantiles_ms([seconds / 1000 for seconds in range(101)]) == pytest.approx((50, 95, 99))
    assert quantiles_ms([]) is None
