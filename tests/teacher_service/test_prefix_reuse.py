"""The prefix cache in the service: over real gRPC, whichever way the sessions before have ended."""

import asyncio

import grpc
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import teacher_pb2
from tests.teacher_service.fakes import FakeEngine, Gate, answer, half_right, root_only
from tests.teacher_service.peer import Served, serving, until

PROMPT = [11, 5, 80, 2, 41, 7]
P = len(PROMPT)
FIRST, SECOND = answer(PROMPT, 2)
LATER = [*PROMPT, FIRST, SECOND, 9]


async def stats(served: Served) -> teacher_pb2.PrefixCacheStats:
    return (await served.stub.GetModel(teacher_pb2.GetModelRequest())).prefix_cache


async def test_a_second_session_starts_from_one_that_runs_and_a_third_from_one_that_ended():
    with capture_logs() as lines:
        async with serving(FakeEngine()) as served:
            one, two, three = (served.session() for _ in range(3))
            assert (await one.open(PROMPT)).cached_tokens == 0
            prefilled = await two.open(PROMPT)
            assert (prefilled.cached_tokens, prefilled.next_token_id, prefilled.committed_length) == (P - 1, FIRST, P)
            await one.verdict(1, P, 0, TokenTree.root_only(FIRST))
            await one.verdict(2, P + 1, 0, TokenTree.root_only(SECOND))
            await one.close()
            assert (await three.open(LATER)).cached_tokens == P + 1
            found = await stats(served)
            assert (found.token_limit, found.tokens, found.entries) == (8192, P + 1, 1)
            assert (found.sessions, found.hits, found.hit_tokens) == (3, 2, P - 1 + P + 1)
    cached = [line["cached_tokens"] for line in lines if line["event"] == "prompt prefilled"]
    assert cached == [0, P - 1, P + 1]


@pytest.mark.parametrize("draft", [root_only, half_right])
@pytest.mark.parametrize("chunk", [1, 4, 100])
async def test_an_answer_stays_the_teachers_own_whatever_its_session_starts_from(draft, chunk):
    async with serving(FakeEngine(), prefill_chunk=chunk) as served:
        cached = []
        for end in (0, 3, 9, 9, 1):
            history = [*PROMPT, *answer(PROMPT, end)]
            session = served.session()
            assert await session.decode(history, 12, draft) == answer(history, 12)
            cached.append(session.prefilled.cached_tokens)
            await session.close()
        assert cached == [0, P + 2, P + 8, P + 8, P]


@pytest.mark.parametrize("end", ["cancel", "bad message", "idle"])
async def test_a_session_that_does_not_end_well_serves_later_ones_too(end):
    async with serving(FakeEngine(), session_idle_seconds=0.3 if end == "idle" else 60) as served:
        session = served.session()
        await session.open(PROMPT)
        if end == "cancel":
            session.call.cancel()
        elif end == "bad message":
            await session.send_open(PROMPT)
        await served.service.slots.idle()
        assert (await served.session().open(LATER)).cached_tokens == P


async def test_a_session_whose_forward_pass_failed_serves_nobody():
    engine = FakeEngine()
    async with serving(engine) as served:
        session = served.session()
        await session.open(PROMPT)
        engine.before = lambda call: engine.no_such_attribute
        await session.send_verify(1, P, 0, TokenTree.root_only(FIRST))
        assert (await session.status())[0] is grpc.StatusCode.INTERNAL
        engine.before = lambda call: None
        assert (await served.session().open(LATER)).cached_tokens == 0
        assert (await stats(served)).entries == 0


async def test_a_session_cancelled_in_a_pass_is_kept_after_it_and_serves_who_waited_for_its_slot():
    engine = FakeEngine()
    gate = Gate(engine, "prefill 4+2")
    async with serving(engine, slots=1) as served:
        first, second = served.session(), served.session()
        await first.send_open(PROMPT)
        await gate.reached()
        await second.send_open(LATER)
        first.call.cancel()
        gate.let()
        assert (await second.read()).HasField("opened")
        while not (response := await second.read()).HasField("prefilled"):
            pass
        assert response.prefilled.cached_tokens == P


async def test_draining_waits_for_what_is_kept_of_the_sessions_and_stopping_does_not():
    engine = FakeEngine()
    gate = Gate(engine, "prefill 0+")
    async with serving(engine) as served:
        session = served.session()
        await session.send_open(PROMPT)
        await gate.reached()
        session.call.cancel()
        await until(lambda: served.service.worker.heartbeat().waiting == 1)  # what is to be kept, behind the held pass
        drained = asyncio.create_task(served.service.drained())
        stopping = asyncio.create_task(served.service.stop())
        await until(lambda: served.service.worker.heartbeat().waiting == 0)
        await drained
        gate.let()
        await stopping
        assert (await stats(served)).entries == 0  # dropped with the worker


async def test_with_the_cache_off_every_session_reads_its_prompt():
    async with serving(FakeEngine(), prefix_cache_tokens=0) as served:
        running, later = served.session(), served.session()
        await running.open(PROMPT)
        assert (await later.open(PROMPT)).cached_tokens == 0
        await later.close()
        found = await stats(served)
        assert found == teacher_pb2.PrefixCacheStats(sessions=2)


@pytest.mark.parametrize("tokens", [-1, 0.5, "many"])
def test_a_limit_that_is_no_number_of_tokens_stops_the_start(tokens):
    with pytest.raises(ValidationError, match="prefix_cache_tokens"):
        TeacherSettings(prefix_cache_tokens=tokens)
