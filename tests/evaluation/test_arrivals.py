"""When work is started: by clients in a closed loop, and at the times of a Poisson process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from eagle_pangu.evaluation.arrivals import Load, Work, arrival_times, under_load

FAST = 1e5  # arrivals a second


class Counted:
    """Work that counts how many run at once."""

    def __init__(self) -> None:
        self.open = self.peak = 0

    def work(self, value: int) -> Work[int]:
        async def work(arrived: float) -> int:
            self.open += 1
            self.peak = max(self.peak, self.open)
            for _ in range(3 * value):  # later ones take longer, and end in another order
                await asyncio.sleep(0)
            self.open -= 1
            return value

        return work


@pytest.mark.parametrize("rate", [None, FAST])
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_never_more_are_open_than_asked_for_and_values_come_in_order(
    rate: float | None, concurrency: int
) -> None:
    counted = Counted()
    values = [5, 1, 4, 2, 0, 3]
    assert await under_load(map(counted.work, values), Load(concurrency, rate)) == values
    assert counted.peak == concurrency if rate is None else counted.peak <= concurrency


def waiting_for(event: asyncio.Event) -> Work[str]:
    async def work(arrived: float) -> str:
        await event.wait()
        return "waited"

    return work


def setting(event: asyncio.Event) -> Work[str]:
    async def work(arrived: float) -> str:
        event.set()
        return "set"

    return work


async def test_a_client_that_is_free_takes_the_next_though_an_earlier_one_lasts() -> None:
    event, values = asyncio.Event(), ["waited", "quick", "quick", "set"]
    works = [waiting_for(event), *[_quick] * 2, setting(event)]
    assert await under_load(works, Load(2)) == values


async def test_poisson_arrivals_wait_for_no_answer() -> None:
    event = asyncio.Event()
    works = [waiting_for(event), waiting_for(event), setting(event)]
    assert await under_load(works, Load(None, FAST)) == ["waited", "waited", "set"]


async def test_a_request_that_finds_no_room_keeps_the_time_at_which_it_came() -> None:
    arrivals: list[float] = []

    async def work(arrived: float) -> None:
        arrivals.append(arrived)
        await asyncio.sleep(0)

    await under_load([work] * 5, Load(1, FAST, seed=3))
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    expected = [later - earlier for earlier, later in pairwise(islice(arrival_times(FAST, 3), 5))]
    assert gaps == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("load", [Load(2), Load(None, FAST)])
async def test_the_first_failure_ends_the_load_as_it_is(load: Load) -> None:
    cancelled: list[bool] = []

    async def failing(arrived: float) -> None:
        raise KeyError("at fault")

    async def lasting(arrived: float) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyError, match="at fault"):
        await under_load([lasting, failing], load)
    assert cancelled == [True]


async def test_work_is_read_as_the_load_goes_on() -> None:
    read: list[int] = []

    def works() -> Iterator[Work[int]]:
        for place in range(4):
            read.append(place)

            async def work(arrived: float, place: int = place) -> int:
                assert read == list(range(place + 1))
                return place

            yield work

    assert await under_load(works(), Load(1)) == [0, 1, 2, 3]


def test_arrival_times_have_their_rate_and_depend_on_the_seed_alone() -> None:
    times = list(islice(arrival_times(4.0, seed=1), 4000))
    assert times == sorted(times)
    assert times == list(islice(arrival_times(4.0, seed=1), 4000))
    assert times != list(islice(arrival_times(4.0, seed=2), 4000))
    assert times[-1] == pytest.approx(1000, rel=0.1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    squares = sum(gap * gap for gap in gaps) / len(gaps)
    assert squares == pytest.approx(2 * 0.25**2, rel=0.15)  # of an exponential; equal gaps would give half of it


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((None,), "expected a concurrency, an arrival rate, or both"),
        ((0,), "concurrency: expected at least 1, got 0"),
        ((1, 0.0), "arrival_rate: expected"),
        ((1, float("nan")), "arrival_rate: expected"),
    ],
)
def test_a_load_without_meaning_is_refused(fields: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Load(*fields)  # type: ignore[arg-type]


async def _quick(arrived: float) -> str:
    return "quick"
