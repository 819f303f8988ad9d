"""A draft that keeps its connections and answers nothing, as after SIGSTOP.

It costs the first requests a deadline and the others none, and is used again soon after it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from eagle_pangu.speculation.tree import TokenTree
from orchestrator import drafters, drafting
from orchestrator.breaker import CircuitBreaker
from protos.v1 import draft_pb2_grpc, generation_pb2
from tests.orchestrator.conftest import Stack, serve, stack
from tests.orchestrator.scripted import Asked, ScriptedTeacher, ids_of, knowing, plain, scrambled

PROMPT = ids_of("prompt")
TOKENS = 12
EXPECTED = plain(scrambled, PROMPT, 512)
TWO_RIGHT = knowing(scrambled, lambda number: 2)
FOREVER = 60.0


async def stats_of(each: Stack, tokens: int = TOKENS, **fields: Any) -> generation_pb2.SpeculationStats:
    """Of one request, whose tokens are the teacher's."""
    response = await each.generate(max_tokens=tokens, **fields)
    assert list(response.token_ids) == EXPECTED[:tokens]
    return response.speculation


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - the breaker tells nobody
            await asyncio.sleep(0.01)


async def names_on_offer(each: Stack) -> list[str]:
    info = await each.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
    return list(info.drafters)


def circuit(each: Stack) -> CircuitBreaker:
    """The one of the draft; nothing on the wire tells its state."""
    services = each.service._servicer._loaded
    assert services is not None
    assert services.draft is not None
    return services.draft.breaker


async def test_one_request_pays_for_a_frozen_draft_and_none_pays_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "PROBE_SECONDS", 0.3)
    async with stack(plan=TWO_RIGHT, draft_deadline_seconds=1, draft_retry_seconds=0.2) as each:
        await stats_of(each)
        each.draft.awake.clear()
        first = await stats_of(each)
        assert first.fallback_reasons[0] == "deadline"
        calls, rests = each.draft.calls_of_propose, each.draft.calls_of_get_drafters
        while each.draft.calls_of_get_drafters < rests + 2:  # over at least one rest, and while the probe waits
            many = await asyncio.gather(*(stats_of(each) for _ in range(4)))
            assert {tuple(stats.fallback_reasons) for stats in many} == {("unavailable",)}
            assert {stats.fallback_rounds for stats in many} == {TOKENS - 2}
            await asyncio.sleep(0.1)
        assert each.draft.calls_of_propose == calls
        each.draft.awake.set()
        await until(lambda: not circuit(each).is_open)
        assert (await stats_of(each)).fallback_rounds == 0


async def test_a_draft_that_is_back_is_used_again_by_a_request_under_way() -> None:
    async with stack(plan=TWO_RIGHT, draft_deadline_seconds=0.3, draft_retry_seconds=0.2) as each:
        await stats_of(each)

        async def wake_in_round_six(record: Any, _context: Any) -> None:
            if len(record.rounds) == 6:
                each.draft.awake.set()
                await until(lambda: not circuit(each).is_open)

        each.draft.awake.clear()
        each.teacher.on_verify = wake_in_round_six
        stats = await stats_of(each, 24)
    assert stats.fallback_reasons[0] == "deadline"
    assert stats.fallback_rounds == 6
    assert stats.accepted > 6


async def test_a_session_opened_before_is_not_asked_once_the_draft_is_known_to_be_silent() -> None:
    async with stack(plan=TWO_RIGHT, draft_deadline_seconds=1, draft_retry_seconds=FOREVER) as each:
        waiting, go_on = asyncio.Event(), asyncio.Event()

        async def hold_the_first(record: Any, _context: Any) -> None:
            if record is each.teacher.sessions[0] and len(record.rounds) == 2:
                waiting.set()
                await go_on.wait()

        each.teacher.on_verify = hold_the_first
        early = asyncio.create_task(stats_of(each))
        await waiting.wait()
        each.draft.awake.clear()
        await stats_of(each)
        go_on.set()
        stats = await early
    assert list(stats.fallback_reasons) == ["unavailable"]
    assert len(each.draft.asked) == 2


async def test_deadlines_missed_by_opened_sessions_of_two_requests_open_the_circuit() -> None:
    async with stack(plan=lambda asked: [], draft_deadline_seconds=0.3, draft_retry_seconds=FOREVER) as each:
        reasons = [list((await stats_of(each)).fallback_reasons) for _ in range(4)]
    assert reasons == [["deadline"], ["deadline"], ["unavailable"], ["unavailable"]]
    assert len(each.draft.asked) == 2


async def test_deadlines_missed_by_sessions_do_not_count_when_another_was_answered_between() -> None:
    def plan(asked: Asked) -> TokenTree | list[Any]:
        return TWO_RIGHT(asked) if 1 <= asked.number <= 4 else []

    async with stack(plan=plan, draft_deadline_seconds=0.3, draft_retry_seconds=FOREVER) as each:
        late, served, late_again = [await stats_of(each) for _ in range(3)]
        assert not circuit(each).is_open
    assert (late.accepted, served.fallback_rounds, late_again.accepted) == (0, 0, 0)
    assert list(late_again.fallback_reasons) == ["deadline"]


async def test_a_late_answer_shows_that_the_draft_is_back_before_the_rest_is_over() -> None:
    async with stack(plan=TWO_RIGHT, draft_deadline_seconds=0.3, draft_retry_seconds=FOREVER) as each:
        waiting, go_on = asyncio.Event(), asyncio.Event()

        async def freeze_then_hold(record: Any, _context: Any) -> None:
            if record is each.teacher.sessions[0] and len(record.rounds) == 2:
                each.draft.awake.clear()
            if record is each.teacher.sessions[0] and len(record.rounds) == 3:
                waiting.set()
                await go_on.wait()

        each.teacher.on_verify = freeze_then_hold
        early = asyncio.create_task(stats_of(each))
        await waiting.wait()
        await stats_of(each)
        assert circuit(each).is_open
        each.draft.awake.set()
        await until(lambda: not circuit(each).is_open)
        assert (await stats_of(each)).fallback_rounds == 0
        go_on.set()
        assert (await early).fallback_rounds == 1


async def test_a_request_whose_session_died_while_late_gets_the_draft_that_was_restarted() -> None:
    async with stack(plan=TWO_RIGHT, draft_deadline_seconds=0.3, draft_retry_seconds=0.1) as each:
        restarted = []

        async def restart(record: Any, _context: Any) -> None:
            if len(record.rounds) == 1:
                each.draft.awake.clear()
            if len(record.rounds) == 3 and not restarted:
                await each.draft_server.stop(None)
                await until(lambda: circuit(each).is_open)
                each.draft.awake.set()
                server, _ = await serve(draft_pb2_grpc.add_DraftServiceServicer_to_server, each.draft, each.draft_port)
                restarted.append(server)
                await until(lambda: not circuit(each).is_open)

        each.teacher.on_verify = restart
        stats = await stats_of(each, 24)
        await restarted[0].stop(None)
    assert list(stats.fallback_reasons) == ["deadline"]
    assert stats.fallback_rounds == 2
    assert stats.accepted > 6


@pytest.mark.parametrize("code", [grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL])
async def test_a_session_that_ends_alone_keeps_no_other_request_away(code: grpc.StatusCode) -> None:
    async with stack(plan=TWO_RIGHT, draft_retry_seconds=FOREVER) as each:

        async def end(asked: Asked, context: grpc.aio.ServicerContext) -> None:
            if asked.number == 1:
                await context.abort(code, "this session only")

        each.draft.on_propose = end
        first, second = await stats_of(each), await stats_of(each)
    assert list(first.fallback_reasons) == ["unavailable"]
    assert second.fallback_rounds == 0


async def test_the_names_of_drafters_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(drafters, "REST_SECONDS", 0.2)
    async with stack(ScriptedTeacher(), TWO_RIGHT, draft_deadline_seconds=0.3, draft_retry_seconds=FOREVER) as each:
        each.draft.awake.clear()
        for _ in range(3):
            await stats_of(each, drafter="scripted")
        assert each.draft.calls_of_get_drafters in (1, 2)  # the second one is a probe
        each.draft.awake.set()
        async with asyncio.timeout(15):
            while "scripted" not in await names_on_offer(each):  # noqa: ASYNC110 - the probe tells nobody
                await asyncio.sleep(0.01)
