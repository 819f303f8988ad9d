"""However a stream ends, its slot is free again and the model goes on with the others."""

import asyncio
import gc
import weakref

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from eagle_pangu.speculation.tree import TokenTree
from tests.teacher_service.fakes import FakeEngine, Gate, answer, root_only
from tests.teacher_service.peer import serving, until

PROMPT = [11, 5, 80, 2, 41, 7]
P = len(PROMPT)
FIRST, SECOND, THIRD = answer(PROMPT, 3)


@pytest.mark.parametrize("place", ["prefill", "verify"])
async def test_a_session_cancelled_while_the_model_works_for_it_frees_its_slot_once_its_pass_is_over(place):
    engine = FakeEngine()
    gate = Gate(engine, place)
    async with serving(engine, prefill_chunk=4) as served:
        session = served.session()
        await session.send_open(PROMPT)
        if place == "verify":
            await session.read_prefilled()
            await session.send_verify(1, P, 0, TokenTree.root_only(FIRST))
        await gate.reached()
        session.call.cancel()
        await until(lambda: served.service.worker.heartbeat().waiting == 1)  # its end, behind the pass that is held
        assert served.service.slots.in_use == 1
        engine.before = lambda call: None
        gate.let()
        await served.service.slots.idle()
        assert await served.session().decode([1, 2, 3], 5, root_only) == answer([1, 2, 3], 5)
        assert len([call for call in engine.calls if call.startswith("prefill") and call.endswith("of 11")]) <= 2
        assert "prefill 4+2 of 11" not in engine.calls or place == "verify"


async def test_a_session_cancelled_while_its_work_waits_takes_it_out_of_the_models_queue():
    engine = FakeEngine()
    gate = Gate(engine, "prefill")
    with capture_logs() as lines:
        async with serving(engine) as served:
            first, second = served.session(), served.session()
            await first.send_open(PROMPT)
            await gate.reached()
            await second.send_open([1, 2, 3])
            await until(lambda: served.service.worker.heartbeat().waiting == 1)
            second.call.cancel()
            await until(lambda: lines[-1]["event"] == "session ended")
            gate.let(2)
            await first.read_prefilled()
            assert engine.calls == ["prefill 0+4 of 11", "prefill 4+2 of 11"]
            await until(lambda: served.service.slots.in_use == 1)


async def test_a_session_cancelled_between_rounds_frees_its_slot():
    async with serving(FakeEngine()) as served:
        session = served.session()
        await session.open(PROMPT)
        session.call.cancel()
        await served.service.slots.idle()


async def test_a_session_cancelled_in_the_queue_leaves_it():
    async with serving(FakeEngine(), slots=1) as served:
        first, second = served.session(), served.session()
        await first.open(PROMPT)
        await second.send_open(PROMPT)
        await until(lambda: served.service.slots.waiting == 1)
        second.call.cancel()
        await until(lambda: served.service.slots.waiting == 0)
        await first.close()
        await served.service.slots.idle()


async def test_a_deadline_ends_a_session_and_frees_its_slot():
    async with serving(FakeEngine()) as served:
        session = served.session()
        session.call = served.stub.Verify(timeout=0.3)
        await session.open(PROMPT)
        assert (await session.status())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.service.slots.idle()


async def test_a_client_that_closes_its_connection_frees_its_slot():
    async with serving(FakeEngine()) as served:
        await served.session().open(PROMPT)
        assert served.service.slots.in_use == 1
        await served.connection.close(grace=None)
        await served.service.slots.idle()


@pytest.mark.parametrize("end", ["close", "cancel", "fail"])
async def test_the_kv_of_a_session_is_gone_with_it_and_waits_for_no_garbage_collector(end):
    engine = FakeEngine()
    async with serving(engine) as served:
        session = served.session()
        await session.open(PROMPT)
        await session.verdict(1, P, 0, TokenTree.root_only(FIRST))
        kv = weakref.ref(engine.slots.pop())
        gc.collect()
        gc.disable()
        try:
            assert kv() is not None
            if end == "close":
                await session.close()
            elif end == "cancel":
                session.call.cancel()
            else:
                engine.before = lambda call: engine.no_such_attribute
                await session.send_verify(2, P + 1, 0, TokenTree.root_only(SECOND))
                assert (await session.status())[0] is grpc.StatusCode.INTERNAL
            await until(lambda: kv() is None)
        finally:
            gc.enable()


@settings(max_examples=15, deadline=None)
@given(yields=st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_sessions_cancelled_at_random_points_leave_no_slot_behind(yields):
    """Each number is how many turns of the event loop a session gets before it is cancelled."""

    async def story() -> None:
        async with serving(FakeEngine(), slots=1, queue_limit=8, prefill_chunk=1) as served:
            for turns in yields:
                session = served.session()
                decoding = asyncio.create_task(session.decode(PROMPT, 20, root_only))
                for _ in range(turns):
                    await asyncio.sleep(0)
                session.call.cancel()
                decoding.cancel()
                await asyncio.gather(decoding, return_exceptions=True)
            assert await served.session().decode([1, 2, 3], 5, root_only) == answer([1, 2, 3], 5)
            await until(lambda: served.service.slots.waiting == 0)

    asyncio.run(story())
