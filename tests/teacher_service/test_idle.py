"""A peer that falls silent does not keep its slot; a session that has work is not silent."""

import asyncio

import grpc
from structlog.testing import capture_logs

from eagle_pangu.speculation.tree import TokenTree
from tests.teacher_service.fakes import FakeEngine, Gate, answer
from tests.teacher_service.peer import serving, until

PROMPT = [11, 5, 80, 2, 41, 7]
P = len(PROMPT)
FIRST, SECOND = answer(PROMPT, 2)
IDLE_SECONDS = 1.0  # far above what a busy machine takes between two messages of these stories


async def test_the_slot_of_a_silent_session_goes_to_who_waits_for_it_and_the_peer_learns_why():
    with capture_logs() as lines:
        async with serving(FakeEngine(), slots=1, session_idle_seconds=IDLE_SECONDS) as served:
            silent, waiting = served.session(), served.session()
            await silent.open(PROMPT)
            await waiting.send_open([1, 2, 3])
            await waiting.read_prefilled()
            code, text = await silent.status()
            assert code is grpc.StatusCode.ABORTED
            assert text == "message: expected one within 1 s (teacher.session_idle_seconds), got nothing"
            assert await waiting.close() is grpc.StatusCode.OK
            await served.service.slots.idle()
    line = next(line for line in lines if line["event"] == "session idle")
    assert (line["log_level"], line["idle_seconds"]) == ("warning", IDLE_SECONDS)


async def test_a_stream_that_never_opens_a_session_is_ended_too():
    async with serving(FakeEngine(), session_idle_seconds=IDLE_SECONDS) as served:
        assert (await served.session().status())[0] is grpc.StatusCode.ABORTED


async def test_time_in_the_queue_and_under_the_model_is_not_idle():
    engine = FakeEngine()
    gate = Gate(engine, "")
    async with serving(engine, slots=1, prefill_chunk=100, session_idle_seconds=IDLE_SECONDS) as served:
        # All that each one says is said at once, so that only the teacher takes its time.
        first, second = served.session(), served.session()
        for session in (first, second):
            await session.send_open(PROMPT)
            await session.send_verify(1, P, 0, TokenTree.root_only(FIRST))
            await session.call.done_writing()
        await gate.reached()
        await until(lambda: served.service.slots.waiting == 1)
        await asyncio.sleep(1.2 * IDLE_SECONDS)  # in the prefill of one and the queue of the other
        gate.let()
        await gate.reached()
        await asyncio.sleep(1.2 * IDLE_SECONDS)  # in the verification
        gate.let(3)
        for session in (first, second):
            await session.read_prefilled()
            assert (await session.read()).verdict.next_token_id == SECOND
            assert await session.status() == (grpc.StatusCode.OK, "")
