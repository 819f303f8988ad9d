"""Many sessions on one model: fairness, isolation of failures, admission, drain."""

import asyncio

import grpc
from google.rpc import error_details_pb2

from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import teacher_pb2
from tests.teacher_service.fakes import FakeEngine, Gate, answer, next_token
from tests.teacher_service.peer import serving, until

PROMPT = [11, 5, 80, 2, 41, 7]
P = len(PROMPT)
FIRST = answer(PROMPT, 1)[0]


async def test_a_long_prefill_keeps_another_sessions_round_waiting_for_one_chunk_and_shares_the_next_with_it():
    engine = FakeEngine()
    async with serving(engine, prefill_chunk=4) as served:
        quick, slow = served.session(), served.session()
        await quick.open([1, 2, 3])
        gate = Gate(engine, "prefill")
        del engine.calls[:]
        await slow.send_open([50] * 20)
        await gate.reached()  # the first of five chunks is under way
        answering = asyncio.create_task(quick.verify(1, 3, 0, TokenTree.root_only(next_token([1, 2, 3]))))
        await until(lambda: served.service.worker.heartbeat().waiting == 1)
        gate.let(2)
        verdict = (await answering).verdict  # while three chunks are still held
        await gate.reached()
        await gate.reached()
        assert engine.calls == ["prefill 0+4 of 50", "verify 1 of 1", "prefill 4+4 of 50", "prefill 8+4 of 50"]
        assert (verdict.timings.batch_sessions, verdict.timings.batch_rows) == (2, 5)
        gate.let(3)
        await slow.read_prefilled()


async def test_a_long_prefill_does_not_hold_back_another_sessions_opening():
    engine = FakeEngine()
    gate = Gate(engine, "prefill")
    async with serving(engine, prefill_chunk=4) as served:
        slow, quick = served.session(), served.session()
        await slow.send_open([50] * 20)
        await gate.reached()
        await quick.send_open([1, 2, 3])
        await until(lambda: served.service.worker.heartbeat().waiting == 1)
        gate.let(3)
        await quick.read_prefilled()
        assert engine.calls[:3] == ["prefill 0+4 of 50", "prefill 0+3 of 1", "prefill 4+1 of 50"]
        gate.let(4)
        await slow.read_prefilled()


async def test_the_event_loop_answers_while_the_model_computes():
    engine = FakeEngine()
    gate = Gate(engine, "prefill")
    async with serving(engine) as served:
        session = served.session()
        await session.send_open(PROMPT)
        await gate.reached()
        model = await served.stub.GetModel(teacher_pb2.GetModelRequest())
        assert model.free_slots == 1
        assert served.service.worker.heartbeat().busy_since is not None
        gate.let(2)
        await session.read_prefilled()


async def test_an_exception_in_a_forward_pass_ends_its_own_session_only_and_keeps_its_text_to_itself():
    engine = FakeEngine()
    async with serving(engine) as served:
        sound, doomed = served.session(), served.session()
        await sound.open([1, 2, 3])
        await doomed.open(PROMPT, request_id="doomed-7")

        def fail(call: str) -> None:
            if call == f"verify 1 of {PROMPT[0]}":
                raise RuntimeError("secret of the model")

        engine.before = fail
        await doomed.send_verify(1, P, 0, TokenTree.root_only(FIRST))
        code, text = await doomed.status()
        assert code is grpc.StatusCode.INTERNAL
        assert "secret" not in text
        assert "doomed-7" in text
        root = next_token([1, 2, 3])
        assert (await sound.verdict(1, 3, 0, TokenTree.root_only(root))).next_token_id == next_token([1, 2, 3, root])
        await until(lambda: served.service.slots.in_use == 1)


async def test_a_full_queue_refuses_with_retry_info_and_a_freed_slot_serves_the_next_in_line():
    async with serving(FakeEngine()) as served:  # two slots, one place in the queue
        first, second, third, fourth = (served.session() for _ in range(4))
        await first.open(PROMPT)
        await second.open(PROMPT)
        await third.send_open(PROMPT)
        await until(lambda: served.service.slots.waiting == 1)
        await fourth.send_open(PROMPT)
        retry = await fourth.error_detail(error_details_pb2.RetryInfo())
        assert await fourth.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry.retry_delay.ToMilliseconds() > 0
        assert await first.close() is grpc.StatusCode.OK
        await third.read_prefilled()
        assert third.prefilled.timings.queue_us > 0


async def test_a_freed_slot_serves_the_session_of_the_highest_priority_first():
    async with serving(FakeEngine(), slots=1, queue_limit=2) as served:
        first, low, high = (served.session() for _ in range(3))
        await first.open(PROMPT)
        for waiting, (session, priority) in enumerate(((low, -1), (high, 100)), 1):
            await session.send_open(PROMPT, priority=priority)
            await until(lambda waiting=waiting: served.service.slots.waiting == waiting)
        await first.close()
        await high.read_prefilled()
        assert served.service.slots.waiting == 1
        await high.close()
        await low.read_prefilled()


async def test_a_slot_that_does_not_come_free_in_time_is_refused():
    async with serving(FakeEngine(), slots=1, queue_seconds=0) as served:
        first, second = served.session(), served.session()
        await first.open(PROMPT)
        await second.send_open(PROMPT)
        assert (await second.status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert served.service.slots.in_use == 1


async def test_draining_refuses_who_waits_and_lets_who_runs_finish():
    async with serving(FakeEngine(), slots=1) as served:
        running, waiting = served.session(), served.session()
        await running.open(PROMPT)
        await waiting.send_open(PROMPT)
        await until(lambda: served.service.slots.waiting == 1)
        drained = asyncio.create_task(served.service.drained())
        assert (await waiting.status())[0] is grpc.StatusCode.UNAVAILABLE
        late = served.session()
        await late.send_open(PROMPT)
        assert (await late.status())[0] is grpc.StatusCode.UNAVAILABLE
        await running.verdict(1, P, 0, TokenTree.root_only(FIRST))
        assert not drained.done()
        await running.close()
        await drained
