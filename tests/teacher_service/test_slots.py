import asyncio

import pytest

from eagle_pangu.serving.errors import ResourceExhaustedError, UnavailableError
from teacher_service.slots import Slots


class Holder:
    """Holds a slot in a task of its own until told to end."""

    def __init__(self, slots: Slots, priority: int = 0) -> None:
        self.got, self.end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold(slots, priority))

    async def _hold(self, slots: Slots, priority: int) -> None:
        async with slots.hold(priority):
            self.got.set()
            await self.end.wait()

    async def release(self) -> None:
        self.end.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_freed_slot_goes_to_the_one_that_waits_longest():
    slots = Slots(1, queue_limit=2, queue_seconds=60)
    first, second, third = Holder(slots), Holder(slots), Holder(slots)
    await settle()
    assert (slots.in_use, slots.waiting, slots.free) == (1, 2, 0)
    await first.release()
    await second.got.wait()
    assert not third.got.is_set()
    await second.release()
    await third.got.wait()
    await third.release()
    assert (slots.in_use, slots.waiting, slots.free) == (0, 0, 1)


async def test_past_the_queue_limit_an_opener_is_refused_at_once():
    slots = Slots(1, queue_limit=1, queue_seconds=60)
    first, second = Holder(slots), Holder(slots)
    await settle()
    with pytest.raises(ResourceExhaustedError) as refused:
        async with slots.hold():
            pytest.fail("no slot was free")
    assert refused.value.retry_after_seconds > 0
    await first.release()
    await second.release()
    assert slots.in_use == 0


async def test_a_wait_that_lasts_too_long_ends_in_refusal_and_leaves_the_queue():
    slots = Slots(1, queue_limit=5, queue_seconds=0)
    first = Holder(slots)
    await settle()
    with pytest.raises(ResourceExhaustedError):
        async with slots.hold():
            pytest.fail("no slot was free")
    assert slots.waiting == 0
    await first.release()


async def test_a_cancelled_waiter_leaves_the_queue_and_takes_no_slot():
    slots = Slots(1, queue_limit=2, queue_seconds=60)
    first, second, third = Holder(slots), Holder(slots), Holder(slots)
    await settle()
    second.task.cancel()
    await settle()
    assert slots.waiting == 1
    await first.release()
    await third.got.wait()
    await third.release()
    assert slots.in_use == 0


async def test_a_slot_granted_to_a_waiter_that_is_cancelled_in_the_same_moment_is_not_lost():
    slots = Slots(1, queue_limit=2, queue_seconds=60)
    first, second, third = Holder(slots), Holder(slots), Holder(slots)
    await settle()
    first.end.set()
    first_released = asyncio.create_task(first.release())
    await asyncio.sleep(0)  # the first one frees the slot, the second has not woken yet
    second.task.cancel()
    await first_released
    await third.got.wait()
    assert not second.got.is_set()
    await third.release()
    assert slots.in_use == 0


async def test_an_error_while_holding_frees_the_slot():
    slots = Slots(1, queue_limit=0, queue_seconds=0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with slots.hold():
                raise ZeroDivisionError
    assert slots.in_use == 0


async def test_closing_refuses_waiters_and_newcomers_and_lets_holders_finish():
    slots = Slots(1, queue_limit=2, queue_seconds=60)
    first, second = Holder(slots), Holder(slots)
    await settle()
    slots.close()
    with pytest.raises(UnavailableError):
        await second.task
    with pytest.raises(UnavailableError):
        async with slots.hold():
            pytest.fail("closed")
    idle = asyncio.create_task(slots.idle())
    await settle()
    assert not idle.done()
    await first.release()
    await idle


async def test_a_freed_slot_goes_to_the_highest_priority_and_among_equals_to_the_one_that_waits_longest():
    slots = Slots(1, queue_limit=9, queue_seconds=60)
    first = Holder(slots, -100)
    await settle()
    waiting = {}
    for place, priority in enumerate((0, -3, 5, 0, 5, -3)):
        waiting[place] = Holder(slots, priority)
        await settle()
    order, holder = [], first
    while waiting:
        await holder.release()
        await settle()
        [place] = [place for place, each in waiting.items() if each.got.is_set()]
        order.append(place)
        holder = waiting.pop(place)
    assert order == [2, 4, 0, 3, 1, 5]
    await holder.release()
    assert (slots.in_use, slots.waiting) == (0, 0)


async def test_the_highest_priority_interrupts_nobody_and_is_refused_by_a_full_queue():
    slots = Slots(1, queue_limit=1, queue_seconds=60)
    first, second = Holder(slots, -100), Holder(slots, -100)
    await settle()
    with pytest.raises(ResourceExhaustedError):
        async with slots.hold(100):
            pytest.fail("no slot was free")
    assert first.got.is_set()
    await first.release()
    await second.got.wait()
    await second.release()


async def test_a_cancelled_waiter_of_high_priority_leaves_the_others_in_their_order():
    slots = Slots(1, queue_limit=9, queue_seconds=60)
    first = Holder(slots)
    await settle()
    low, high, middle = (Holder(slots, priority) for priority in (-1, 9, 1))
    await settle()
    high.task.cancel()
    await settle()
    assert slots.waiting == 2
    await first.release()
    await middle.got.wait()
    assert not low.got.is_set()
    await middle.release()
    await low.got.wait()
    await low.release()
