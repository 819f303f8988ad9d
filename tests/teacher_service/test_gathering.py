import pytest

from teacher_service.gathering import ABSENT_SECONDS, ROUNDS_SAVED, Gathering

FIXED = 0.010 / ROUNDS_SAVED


def with_rhythm(gaps: dict[str, float], rounds: int = 40) -> tuple[Gathering, float]:
    """Sessions of steady gaps, all of whom left together just now; and the time."""
    gathering, now = Gathering(), 100.0
    for session in gaps:
        gathering.come(session, now)
    for _ in range(rounds):
        for session, gap in gaps.items():
            gathering.go(session, now)
            gathering.come(session, now + gap)
        now += 1.0
    for session in gaps:
        gathering.go(session, now)
    return gathering, now


def test_a_session_alone_waits_for_nobody():
    gathering, now = with_rhythm({"a": 0.001})
    gathering.come("a", now + 0.001)
    assert gathering.patience(1, FIXED, now + 0.001) == 0


def test_who_comes_soon_is_waited_for_until_then():
    gathering, now = with_rhythm({"a": 0.001, "b": 0.004})
    gathering.come("a", now + 0.001)
    patience = gathering.patience(1, FIXED, now + 0.001)
    assert patience == pytest.approx(0.003, abs=0.0005)
    assert gathering.patience(1, FIXED, now + 0.0045) == 0  # late: nobody knows when it comes


def test_who_comes_after_several_passes_would_be_over_is_not_waited_for():
    gathering, now = with_rhythm({"a": 0.001, "b": 0.020})
    gathering.come("a", now + 0.001)
    assert gathering.patience(1, FIXED, now + 0.001) == 0


def test_nothing_is_saved_where_a_pass_has_no_fixed_cost():
    gathering, now = with_rhythm({"a": 0.001, "b": 0.002})
    gathering.come("a", now + 0.001)
    assert gathering.patience(1, 0.0, now + 0.001) == 0


def test_many_wait_less_for_one_than_one_for_many():
    gaps = {"late": 0.006} | {f"s{n}": 0.001 for n in range(4)}
    gathering, now = with_rhythm(gaps)
    for n in range(4):
        gathering.come(f"s{n}", now + 0.001)
    assert gathering.patience(4, FIXED, now + 0.001) == 0  # 5 ms of four sessions, to save a fifth of a pass each
    gaps = {"early": 0.001} | {f"s{n}": 0.006 for n in range(4)}
    gathering, now = with_rhythm(gaps)
    gathering.come("early", now + 0.001)
    assert gathering.patience(1, FIXED, now + 0.001) == pytest.approx(0.005, abs=0.0005)


def test_in_all_a_pass_never_waits_longer_than_so_many_cost():
    """Others keep being due in a moment; after some `FIXED` seconds it begins all the same."""
    gaps = {f"s{n}": 0.001 + n * 0.002 for n in range(20)}
    gathering, now = with_rhythm(gaps)
    began = now = now + 0.001
    gathering.come("s0", now)
    waiting = 1
    while (patience := gathering.patience(1, FIXED, now)) > 0:
        now += patience
        gathering.come(f"s{waiting}", now)
        waiting += 1
    assert 0 < now - began <= ROUNDS_SAVED * FIXED
    assert waiting < 10


def test_after_a_pass_the_next_one_may_wait_again():
    gathering, now = with_rhythm({"a": 0.001, "b": 0.004})
    for _ in range(2):
        gathering.come("a", now + 0.001)
        assert gathering.patience(1, FIXED, now + 0.001) > 0
        gathering.come("b", now + 0.004)
        assert gathering.patience(2, FIXED, now + 0.004) == 0
        gathering.begin()
        now += 0.010
        gathering.go("a", now)
        gathering.go("b", now)


def test_an_uneven_rhythm_is_given_more_time():
    steady, now = with_rhythm({"a": 0.001, "b": 0.003})
    uneven = Gathering()
    at = 100.0
    for n in range(40):
        for session, gap in (("a", 0.001), ("b", 0.002 if n % 2 else 0.004)):
            uneven.go(session, at)
            uneven.come(session, at + gap)
        at += 1.0
    uneven.go("b", at)
    steady.come("a", now)
    assert uneven.patience(1, FIXED, at) > steady.patience(1, FIXED, now) + 0.0005


def test_a_session_that_ended_is_waited_for_no_more_and_one_long_away_counts_no_more():
    gathering, now = with_rhythm({"a": 0.001, "b": 0.004, "c": 0.004})
    assert gathering.present(now) == 3
    gathering.forget("c")
    assert gathering.present(now) == 2
    gathering.come("a", now + 0.001)
    assert gathering.present(now + ABSENT_SECONDS + 1) == 1  # b is away, a waits
    gathering.forget("b")
    assert gathering.patience(1, FIXED, now + 0.001) == 0
    gathering.forget("never there")


def test_a_session_of_which_no_gap_is_known_is_not_waited_for():
    gathering = Gathering()
    gathering.come("a", 1.0)
    gathering.come("b", 1.0)
    gathering.go("b", 1.1)
    assert gathering.patience(1, FIXED, 1.1) == 0
