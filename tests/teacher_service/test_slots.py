import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_pangu.serving.errors import ResourceExhaustedError, UnavailableError
from teacher_service.slots import Slots


class Holder:
    """Holds a slot in a task of its own until told to end."""

    def __init__(self, slots: Slots, priority: int = 0, tokens: int = 1) -> None:
        self.got, self.end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold(slots, priority, tokens))

    async def _hold(self, slots: Slots, priority: int, tokens: int) -> None:
        lease = await slots.take(tokens, priority)
        self.got.set()
        await self.end.wait()
        lease.give_back()

    async def release(self) -> None:
        self.end.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_freed_slot_goes_to_the_one_that_waits_longest():
    slots = Slots(1, 100, queue_limit=2, queue_seconds=60)
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
    slots = Slots(1, 100, queue_limit=1, queue_seconds=60)
    first, second = Holder(slots), Holder(slots)
    await settle()
    with pytest.raises(ResourceExhaustedError) as refused:
        await slots.take(1)
    assert refused.value.retry_after_seconds > 0
    await first.release()
    await second.release()
    assert slots.in_use == 0


async def test_a_wait_that_lasts_too_long_ends_in_refusal_and_leaves_the_queue():
    slots = Slots(1, 100, queue_limit=5, queue_seconds=0)
    first = Holder(slots)
    await settle()
    with pytest.raises(ResourceExhaustedError):
        await slots.take(1)
    assert slots.waiting == 0
    await first.release()


async def test_a_cancelled_waiter_leaves_the_queue_and_takes_no_slot():
    slots = Slots(1, 100, queue_limit=2, queue_seconds=60)
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
    slots = Slots(1, 100, queue_limit=2, queue_seconds=60)
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


async def test_a_slot_freed_in_the_moment_in_which_the_first_waiter_is_cancelled_goes_to_the_next_one():
    slots = Slots(1, 100, queue_limit=2, queue_seconds=60)
    lease = await slots.take(1)
    second, third = Holder(slots), Holder(slots)
    await settle()
    second.task.cancel()
    lease.give_back()  # the second one is still in the queue: it has not woken to leave it
    await third.got.wait()
    assert second.task.cancelled()
    assert (slots.in_use, slots.tokens_in_use, slots.waiting) == (1, 1, 0)
    await third.release()
    assert (slots.in_use, slots.tokens_in_use) == (0, 0)


async def test_closing_refuses_waiters_and_newcomers_and_lets_holders_finish():
    slots = Slots(1, 100, queue_limit=2, queue_seconds=60)
    first, second = Holder(slots), Holder(slots)
    await settle()
    slots.close()
    with pytest.raises(UnavailableError):
        await second.task
    with pytest.raises(UnavailableError):
        await slots.take(1)
    idle = asyncio.create_task(slots.idle())
    await settle()
    assert not idle.done()
    await first.release()
    await idle


async def test_a_freed_slot_goes_to_the_highest_priority_and_among_equals_to_the_one_that_waits_longest():
    slots = Slots(1, 100, queue_limit=9, queue_seconds=60)
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
    slots = Slots(1, 100, queue_limit=1, queue_seconds=60)
    first, second = Holder(slots, -100), Holder(slots, -100)
    await settle()
    with pytest.raises(ResourceExhaustedError):
        await slots.take(1, 100)
    assert first.got.is_set()
    await first.release()
    await second.got.wait()
    await second.release()


async def test_a_cancelled_waiter_of_high_priority_leaves_the_others_in_their_order():
    slots = Slots(1, 100, queue_limit=9, queue_seconds=60)
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


async def test_a_slot_is_not_enough_where_its_tokens_are_not_free():
    slots = Slots(3, 100, queue_limit=9, queue_seconds=60)
    first, second = Holder(slots, tokens=60), Holder(slots, tokens=60)
    await settle()
    assert (slots.in_use, slots.tokens_in_use, slots.free_tokens, slots.waiting) == (1, 60, 40, 1)
    assert not second.got.is_set()
    await first.release()
    await second.got.wait()
    await second.release()
    assert (slots.in_use, slots.tokens_in_use) == (0, 0)


async def test_one_that_needs_much_is_not_overtaken_by_those_that_need_little_but_by_higher_priority():
    slots = Slots(9, 100, queue_limit=9, queue_seconds=60)
    first = Holder(slots, tokens=60)
    await settle()
    big, small, urgent = Holder(slots, tokens=80), Holder(slots, tokens=1), Holder(slots, priority=1, tokens=30)
    await settle()
    assert (urgent.got.is_set(), big.got.is_set(), small.got.is_set()) == (True, False, False)
    await urgent.release()
    await settle()
    assert not small.got.is_set()
    await first.release()
    await settle()
    assert big.got.is_set()
    assert small.got.is_set()  # there is room beside the big one
    await big.release()
    await small.release()
    assert slots.tokens_in_use == 0


async def test_those_behind_a_big_one_that_gives_up_are_served_at_once():
    slots = Slots(9, 100, queue_limit=9, queue_seconds=60)
    first = Holder(slots, tokens=60)
    await settle()
    big, small = Holder(slots, tokens=80), Holder(slots, tokens=40)
    await settle()
    big.task.cancel()
    await small.got.wait()
    await small.release()
    await first.release()


async def test_one_release_may_serve_several():
    slots = Slots(9, 100, queue_limit=9, queue_seconds=60)
    first = Holder(slots, tokens=100)
    await settle()
    others = [Holder(slots, tokens=30) for _ in range(4)]
    await settle()
    await first.release()
    await settle()
    assert [each.got.is_set() for each in others] == [True, True, True, False]
    for each in others:
        await each.release()


@given(
    st.lists(
        st.tuples(st.sampled_from(["come", "go", "give up"]), st.integers(1, 100), st.integers(-2, 2)), max_size=40
    )
)
@settings(deadline=None, max_examples=50)
def test_any_order_of_openers_keeps_the_counts_and_serves_everybody_in_order(steps):
    async def story() -> None:
        slots = Slots(3, 100, queue_limit=99, queue_seconds=60)
        holders: list[tuple[Holder, int, int]] = []
        for kind, number, priority in steps:
            if kind == "come":
                holders.append((Holder(slots, priority, number), priority, number))
            elif holders:
                holder, *_ = holders.pop(number % len(holders))
                if holder.got.is_set():
                    await holder.release()
                else:
                    holder.task.cancel()
            await settle()
            held = [tokens for holder, _, tokens in holders if holder.got.is_set()]
            assert (slots.in_use, slots.tokens_in_use) == (len(held), sum(held))
            assert len(held) <= 3
            assert sum(held) <= 100
            waiting = [
                (-priority, place, tokens) for place, (h, priority, tokens) in enumerate(holders) if not h.got.is_set()
            ]
            if waiting:  # the head cannot be served, else it would have been
                assert len(held) == 3 or sum(held) + min(waiting)[2] > 100
        while holders:
            served = next(each for each in holders if each[0].got.is_set())
            holders.remove(served)
            await served[0].release()
            await settle()
        assert (slots.in_use, slots.tokens_in_use, slots.waiting) == (0, 0, 0)

    asyncio.run(story())
