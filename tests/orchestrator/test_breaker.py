"""The circuit breaker by itself, with a probe that answers as told."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from orchestrator import breaker
from orchestrator.breaker import CircuitBreaker


class Probe:
    """Fails so often, then succeeds."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.times: list[float] = []

    async def __call__(self) -> bool:
        self.times.append(time.monotonic())
        return len(self.times) > self.failures


async def until_closed(each: CircuitBreaker) -> None:
    async with asyncio.timeout(5):
        while each.is_open:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.005)


async def test_a_failure_opens_it_and_a_probe_after_the_rest_closes_it() -> None:
    probe = Probe()
    each, started = CircuitBreaker(0.05, probe), time.monotonic()
    assert not each.is_open
    each.trip()
    each.trip()
    assert each.is_open
    await until_closed(each)
    assert len(probe.times) == 1
    assert probe.times[0] - started >= 0.05


async def test_each_rest_is_twice_as_long_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "LONGEST_REST_SECONDS", 0.2)
    probe = Probe(failures=4)
    each = CircuitBreaker(0.05, probe)
    started = time.monotonic()
    each.trip()
    await until_closed(each)
    rests = [later - earlier for earlier, later in itertools.pairwise([started, *probe.times])]
    assert all(expected <= rest for expected, rest in zip((0.05, 0.1, 0.2, 0.2, 0.2), rests, strict=True))
    assert rests[-1] < 0.4  # never twice the longest
    each.answered()
    started = time.monotonic()
    each.trip()
    await until_closed(each)
    assert 0.05 <= probe.times[-1] - started < 0.2


async def test_a_failure_right_after_a_probe_rests_longer_than_the_one_before() -> None:
    each = CircuitBreaker(0.05, Probe())
    each.trip()
    await until_closed(each)
    started = time.monotonic()
    each.trip()
    await until_closed(each)
    assert time.monotonic() - started >= 0.1


async def test_an_answer_closes_it_at_once() -> None:
    probe = Probe()
    each = CircuitBreaker(60, probe)
    each.missed(0, opened=False)
    assert each.is_open
    assert each.is_silent
    each.answered()
    assert not each.is_open
    assert not each.is_silent
    assert probe.times == []


async def test_one_missed_deadline_is_the_sessions_and_two_in_silence_are_the_services() -> None:
    each = CircuitBreaker(60, Probe())
    each.missed(0, opened=True)
    assert not each.is_open
    each.answered()
    each.missed(0, opened=True)
    assert not each.is_open
    each.missed(0, opened=True)
    assert each.is_silent


async def test_a_deadline_missed_while_others_were_answered_is_the_sessions() -> None:
    each = CircuitBreaker(60, Probe())
    each.answered()
    for _ in range(3):
        each.missed(5, opened=False)
    assert not each.is_open


async def test_a_death_leaves_the_sessions_that_live_alone() -> None:
    each = CircuitBreaker(60, Probe())
    each.trip()
    assert each.is_open
    assert not each.is_silent


async def test_without_a_rest_it_never_opens() -> None:
    each = CircuitBreaker(0, Probe())
    each.trip()
    each.missed(0, opened=False)
    assert not each.is_open
    assert not each.is_silent
