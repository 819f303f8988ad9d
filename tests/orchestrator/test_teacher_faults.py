"""A lost teacher is a pause: the session is opened anew on the answer so far, and the tokens are the same."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from eagle_pangu.serving.errors import details_of
from orchestrator.teacher import TeacherSession
from protos.v1 import generation_pb2, teacher_pb2_grpc
from tests.orchestrator.conftest import Stack, serve, stack
from tests.orchestrator.scripted import ids_of, plain, scrambled

PROMPT = ids_of("prompt")
TOKENS = 30
EXPECTED = plain(scrambled, PROMPT, TOKENS)


def exact(response: generation_pb2.GenerateResponse) -> generation_pb2.SpeculationStats:
    assert list(response.token_ids) == EXPECTED
    stats = response.speculation
    assert 1 + stats.accepted + stats.rounds == TOKENS
    assert 0 <= stats.accepted <= stats.drafted
    return stats


def losing(rounds: set[int], code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Any:
    """Ends the stream in these verifications, counted over all sessions."""
    seen = 0

    async def lose(_record: Any, context: grpc.aio.ServicerContext) -> None:
        nonlocal seen
        seen += 1
        if seen in rounds:
            await context.abort(code, "killed")

    return lose


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN]
)
async def test_a_lost_teacher_is_reopened_on_prompt_and_answer(usual: Stack, code: grpc.StatusCode) -> None:
    usual.teacher.on_verify = losing({4}, code)
    stats = exact(await usual.generate(max_tokens=TOKENS))
    first, second = usual.teacher.sessions
    # Rounds 1 to 3 gave 1, 2 and 3 tokens after the first.
    assert list(second.open.prompt_token_ids) == [*PROMPT, *EXPECTED[:7]]
    assert second.open.max_new_tokens == TOKENS - 7
    assert second.epoch != first.epoch
    assert list(stats.fallback_reasons) == ["teacher_lost"]
    assert len(usual.draft.sessions) == 1


async def test_a_teacher_may_be_lost_several_times(usual: Stack) -> None:
    usual.teacher.on_verify = losing({1, 5, 6})
    exact(await usual.generate(max_tokens=TOKENS))
    assert len(usual.teacher.sessions) == 4


async def test_teacher_only_decoding_survives_too(usual: Stack) -> None:
    usual.teacher.on_verify = losing({9})
    stats = exact(await usual.generate(max_tokens=TOKENS, drafter="none"))
    assert (stats.rounds, stats.drafted, stats.fallback_rounds) == (TOKENS - 1, 0, 0)


async def test_a_stream_only_pauses(usual: Stack) -> None:
    usual.teacher.on_verify = losing({3, 7})
    parts = await usual.stream(max_tokens=TOKENS)
    assert [token for part in parts for token in part.token_ids] == EXPECTED


async def test_features_still_follow_each_other_after_a_loss() -> None:
    async with stack(needs_features=True) as each:
        each.teacher.on_verify = losing({4})
        exact(await each.generate(max_tokens=TOKENS))
        assert each.draft.features == [token % 256 for token in [*PROMPT, *EXPECTED]][: len(each.draft.features)]


async def test_a_teacher_process_that_comes_back_goes_on() -> None:
    async with stack() as each:
        died, restarted = asyncio.Event(), []

        async def die(record: Any, _context: Any) -> None:
            if len(record.rounds) == 3 and not died.is_set():
                died.set()
                await asyncio.Event().wait()

        async def restart() -> None:
            await died.wait()
            await each.teacher_server.stop(None)
            add = teacher_pb2_grpc.add_TeacherServiceServicer_to_server
            restarted.append((await serve(add, each.teacher, each.teacher_port))[0])

        each.teacher.on_verify = die
        restarting = asyncio.create_task(restart())
        exact(await each.generate(max_tokens=TOKENS))
        await restarting
        await restarted[0].stop(None)


async def test_a_teacher_that_stops_answering_is_given_up_for_a_new_session() -> None:
    async def hang(record: Any, _context: Any) -> None:
        if record is each.teacher.sessions[0] and len(record.rounds) == 3:
            await asyncio.Event().wait()

    async with stack(teacher_deadline_seconds=0.3) as each:
        each.teacher.on_verify = hang
        exact(await each.generate(max_tokens=TOKENS))
        assert len(each.teacher.sessions) == 2
        await each.idle()


async def test_a_teacher_that_says_it_lives_may_take_its_time() -> None:
    async with stack(teacher_deadline_seconds=0.5) as each:
        each.teacher.signs_of_life = [0.1] * 8
        exact(await each.generate(max_tokens=TOKENS))
        assert len(each.teacher.sessions) == 1


async def test_a_teacher_lost_for_good_is_a_status_not_a_hang() -> None:
    async with stack(teacher_deadline_seconds=0.5) as each:

        async def kill(record: Any, _context: Any) -> None:
            if len(record.rounds) == 3:
                stopping.append(asyncio.create_task(each.teacher_server.stop(None)))
                await asyncio.Event().wait()

        stopping: list[asyncio.Task[None]] = []
        each.teacher.on_verify = kill
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await each.generate(max_tokens=TOKENS)
        assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "teacher" in (lost.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as absent:
            await each.generate(max_tokens=TOKENS)
        assert absent.value.code() == grpc.StatusCode.UNAVAILABLE
        await each.draft.idle.wait()


async def test_a_teacher_lost_during_a_drain_is_not_waited_for() -> None:
    async with stack() as each:
        draining: list[asyncio.Task[None]] = []

        async def drain_and_die(record: Any, _context: Any) -> None:
            if len(record.rounds) == 3:
                draining.append(asyncio.create_task(each.service.drained()))
                draining.append(asyncio.create_task(each.teacher_server.stop(None)))
                await asyncio.Event().wait()

        each.teacher.on_verify = drain_and_die
        async with asyncio.timeout(5):  # half the patience
            with pytest.raises(grpc.aio.AioRpcError, match="the teacher is lost") as lost:
                await each.generate(max_tokens=TOKENS)
            assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
            await asyncio.gather(*draining)


async def test_a_drain_ends_the_wait_for_another_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.Event()
    connected = TeacherSession.connected

    async def told(session: TeacherSession) -> None:
        waiting.set()
        await connected(session)

    monkeypatch.setattr(TeacherSession, "connected", told)
    async with stack() as each:

        async def die(record: Any, _context: Any) -> None:
            if len(record.rounds) == 3:
                stopping.append(asyncio.create_task(each.teacher_server.stop(None)))
                await asyncio.Event().wait()

        stopping: list[asyncio.Task[None]] = []
        each.teacher.on_verify = die
        generating = asyncio.create_task(each.generate(max_tokens=TOKENS))
        await waiting.wait()
        await asyncio.gather(*stopping)
        assert not generating.done()
        async with asyncio.timeout(5):
            await each.service.drained()
            with pytest.raises(grpc.aio.AioRpcError, match="the teacher is lost") as lost:
                await generating
        assert lost.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_drain_still_takes_another_teacher_that_is_there(usual: Stack) -> None:
    draining: list[asyncio.Task[None]] = []
    lose = losing({4})

    async def drain_and_lose(record: Any, context: Any) -> None:
        if not draining:
            draining.append(asyncio.create_task(usual.service.drained()))
        await lose(record, context)

    usual.teacher.on_verify = drain_and_lose
    exact(await usual.generate(max_tokens=TOKENS))
    assert len(usual.teacher.sessions) == 2
    await draining[0]


async def test_a_teacher_that_always_fails_is_not_asked_for_ever(usual: Stack) -> None:
    usual.teacher.on_verify = losing(set(range(1, 100)))
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await usual.generate(max_tokens=TOKENS)
    assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
    assert len(usual.teacher.sessions) == 6


async def test_a_full_teacher_is_resource_exhausted_with_a_delay(usual: Stack) -> None:
    async def full(_record: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")

    usual.teacher.on_open = full
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await usual.generate(max_tokens=TOKENS)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    status = details_of(refused.value)
    assert status is not None
    assert status.details[0].Is(error_details_pb2.RetryInfo.DESCRIPTOR)


async def test_one_draining_replica_is_not_the_callers_business(usual: Stack) -> None:
    async def draining(_record: Any, context: grpc.aio.ServicerContext) -> None:
        if len(usual.teacher.sessions) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    usual.teacher.on_open = draining
    exact(await usual.generate(max_tokens=TOKENS))


async def test_a_teacher_replaced_by_another_model_is_fetched_anew(usual: Stack) -> None:
    async def differs(record: Any, context: grpc.aio.ServicerContext) -> None:
        if record.open.fingerprint.context_limit != usual.teacher.context_limit:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a / b")

    usual.teacher.on_open = differs
    usual.teacher.context_limit = 100
    with pytest.raises(grpc.aio.AioRpcError) as changed:
        await usual.generate(max_tokens=TOKENS)
    assert changed.value.code() == grpc.StatusCode.UNAVAILABLE
    async with asyncio.timeout(5):
        while (await usual.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())).teacher.context_limit != 100:
            pass
    exact(await usual.generate(max_tokens=TOKENS))
