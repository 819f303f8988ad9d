"""Who goes together, and that nobody waits for ever."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree
from teacher_service.batching.pool import PASSED_OVER, SequencePool


def sequence(session: int, length: int, since: float = 0.0, rows: int = 1) -> Waiting[Segment]:
    tree = TokenTree.build(range(rows), [0] * rows)
    return Waiting(session, Segment(SimpleNamespace(committed_length=length), tree), since)


def sequences(*lengths: int) -> list[Waiting[Segment]]:
    return [sequence(session, length) for session, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ((7, 5, 7, 5, 7), [0, 2, 4]),
        ((5, 7, 7, 5, 7, 5), [0, 3, 5]),  # two full groups: the one of the oldest
        ((1, 7, 7, 5, 7, 5), [1, 2, 4]),
        ((7, 5, 7, 5, 4), [0, 1, 2]),  # no full group: the oldest
        ((7, 7), [0, 1]),  # fewer than a group, all alike
        ((7, 7, 5), [0, 1, 2]),  # two alike are fewer than the oldest
        ((4, 5, 6, 1, 2, 8, 7, 7, 7), [0, 1, 2]),  # alike, but past the window
        ((9,), [0]),
    ],
)
def test_the_first_full_group_of_one_length_else_the_oldest(lengths: tuple[int, ...], chosen: list[int]) -> None:
    pool = SequencePool(window=6, group_size=3)
    assert [each.session for each in pool.group(sequences(*lengths), 64)] == chosen


def test_the_row_budget_bounds_groups_and_fallback_alike() -> None:
    pool = SequencePool(window=6, group_size=3)
    waiting = [sequence(0, 7, rows=4), sequence(1, 5, rows=2), sequence(2, 7, rows=4), sequence(3, 5, rows=4)]
    assert [each.session for each in pool.group(waiting, 8)] == [0, 2]
    assert [each.session for each in pool.group(waiting[1:], 8)] == [1, 3]
    assert [each.session for each in pool.group(waiting, 3)] == [0]


def test_who_was_served_and_comes_again_starts_anew() -> None:
    pool = SequencePool(window=4, group_size=2)
    for since in range(3 * PASSED_OVER):
        waiting = [sequence(0, 9, since), sequence(1, 5, since), sequence(2, 5, since)]
        assert [each.session for each in pool.group(waiting, 64)] == [1, 2]
        pool.passed()


def test_a_window_smaller_than_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"window: expected at least the group size \(4\), got 3"):
        SequencePool(window=3, group_size=4)


def test_an_odd_length_is_passed_over_so_often_and_no_more() -> None:
    pool, odd = SequencePool(window=8, group_size=2), sequence(0, 9)
    for number in range(PASSED_OVER):
        waiting = [odd, sequence(1, 5, number), sequence(2, 5, number)]
        pool.group(waiting, 64)
        assert [each.session for each in pool.group(waiting, 64)] == [1, 2]  # asked twice, computed once
        pool.passed()
    assert [each.session for each in pool.group(waiting, 64)] == [0, 1]


def test_who_has_left_is_forgotten() -> None:
    pool, odd = SequencePool(window=8, group_size=2), sequence(0, 9)
    pair = [sequence(1, 5), sequence(2, 5)]
    for _ in range(PASSED_OVER):
        assert pool.group([odd, *pair], 64) == pair
        pool.passed()
    pool.group(pair, 64)  # without it
    assert pool.group([odd, *pair], 64) == pair


def test_who_came_after_all_that_were_taken_was_not_passed_over() -> None:
    pool, odd = SequencePool(window=8, group_size=2), sequence(0, 9)
    for number in range(PASSED_OVER):
        waiting = [sequence(1, 5, number), sequence(2, 5, number), odd]
        assert [each.session for each in pool.group(waiting, 64)] == [1, 2]
        pool.passed()
    for number in range(PASSED_OVER):  # only from now on
        waiting = [odd, sequence(1, 5, number), sequence(2, 5, number)]
        assert [each.session for each in pool.group(waiting, 64)] == [1, 2]
        pool.passed()
    assert [each.session for each in pool.group(waiting, 64)] == [0, 1]


@given(st.data(), st.integers(1, 4), st.integers(0, 4))
def test_nobody_waits_longer_than_the_bound(data: st.DataObject, group_size: int, extra: int) -> None:
    """Whatever lengths come, and however fast those that were served come back."""
    pool = SequencePool(group_size + extra, group_size)
    lengths = st.integers(0, 2)
    waiting = [sequence(session, data.draw(lengths)) for session in range(data.draw(st.integers(1, 9)))]
    most = {each: PASSED_OVER + index // group_size for index, each in enumerate(map(id, waiting))}
    for number in range(1, 30):
        chosen = pool.group(waiting, 64)
        pool.passed()
        waiting = [each for each in waiting if each not in chosen]
        for each in waiting:
            most[id(each)] -= 1
            assert most[id(each)] >= 0
        for each in chosen:
            if data.draw(st.booleans()):
                waiting.append(sequence(each.session, data.draw(lengths), float(number)))
                most[id(waiting[-1])] = PASSED_OVER + (len(waiting) - 1) // group_size
        if not waiting:
            return
