"""A draft that is absent, slow, wrong or dead costs rounds, told with a reason; never a token."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import generation_pb2, teacher_pb2, tree_pb2
from tests.orchestrator.conftest import Stack, stack
from tests.orchestrator.scripted import Asked, ScriptedTeacher, ids_of, knowing, plain, proposal, scrambled

PROMPT = ids_of("prompt")
TOKENS = 24
EXPECTED = plain(scrambled, PROMPT, TOKENS)
TWO_RIGHT = knowing(scrambled, lambda number: 2)


def exact(response: generation_pb2.GenerateResponse) -> generation_pb2.SpeculationStats:
    """The tokens are the teacher's and the counters agree with them."""
    assert list(response.token_ids) == EXPECTED[: len(response.token_ids)]
    stats = response.speculation
    assert len(response.token_ids) - (1 + stats.accepted + stats.rounds) in (0, -1)
    assert 0 <= stats.accepted <= stats.drafted
    return stats


async def test_an_absent_draft_costs_speed_only() -> None:
    async with stack(with_draft=False) as each:
        stats = exact(await each.generate(max_tokens=TOKENS, drafter="scripted"))
        parts = await each.stream(max_tokens=TOKENS)
    assert list(stats.fallback_reasons) == ["unavailable"]
    assert stats.fallback_rounds == TOKENS - 2  # the last round has no use for a draft
    assert stats.rounds == TOKENS - 1
    assert stats.drafter == "none"
    assert list(parts[-1].speculation.fallback_reasons) == ["unavailable"]


async def test_an_orchestrator_without_a_draft_offers_teacher_only() -> None:
    async with stack(draft="") as each:
        stats = exact(await each.generate(max_tokens=TOKENS))
        info = await each.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
    assert (stats.drafter, stats.fallback_rounds) == ("none", 0)
    assert (list(info.drafters), info.default_drafter) == (["none"], "none")


async def test_a_late_proposal_is_thrown_away_and_the_draft_asked_again() -> None:
    gate = asyncio.Event()
    async with stack(plan=TWO_RIGHT, draft_deadline_seconds=0.4) as each:

        async def late(asked: Asked, _context: Any) -> None:
            if asked.number == 1:
                await gate.wait()

        async def let_it_answer_in_round_six(record: Any, _context: Any) -> None:
            if len(record.rounds) == 6:
                gate.set()
                async with each.draft.answered:
                    await each.draft.answered.wait_for(lambda: each.draft.answers == 2)

        each.draft.on_propose = late
        each.teacher.on_verify = let_it_answer_in_round_six
        stats = exact(await each.generate(max_tokens=TOKENS))
    assert list(stats.fallback_reasons) == ["deadline"]
    # Missed in round 2, not asked while the answer is due; asked again from round 7 (or 8, as the late answer arrives).
    assert stats.fallback_rounds in (5, 6)
    asked_again = each.draft.asked[2]
    assert asked_again.round == stats.fallback_rounds + 2
    assert asked_again.sequence == [*PROMPT, *EXPECTED[: 1 + 3 + stats.fallback_rounds]]
    assert len(each.draft.sessions) == 1


async def test_a_draft_that_never_answers_is_asked_once() -> None:
    async with stack(plan=lambda asked: [], draft_deadline_seconds=0.4, draft_retry_seconds=60) as each:
        stats = exact(await each.generate(max_tokens=TOKENS))
    assert list(stats.fallback_reasons) == ["deadline"]
    assert stats.fallback_rounds == TOKENS - 2
    assert len(each.draft.asked) == 1


@pytest.mark.parametrize(("rest", "asked"), [(60, 2), (0, 4)])
async def test_a_draft_that_is_late_twice_in_a_row_gets_a_rest(rest: float, asked: int) -> None:
    answering = asyncio.Semaphore(0)
    async with stack(plan=TWO_RIGHT, draft_deadline_seconds=0.4, draft_retry_seconds=rest) as each:

        async def late(_asked: Asked, _context: Any) -> None:
            await answering.acquire()

        async def answer_after_the_deadline(_record: Any, _context: Any) -> None:
            async with each.draft.answered:
                if each.draft.answers < len(each.draft.asked) <= 4:
                    answering.release()
                    await each.draft.answered.wait_for(lambda: each.draft.answers == len(each.draft.asked))

        each.draft.on_propose = late
        each.teacher.on_verify = answer_after_the_deadline
        stats = exact(await each.generate(max_tokens=10))
    assert list(stats.fallback_reasons) == ["deadline"]
    assert stats.fallback_rounds == 8
    assert min(len(each.draft.asked), 4) == asked


async def test_a_draft_that_never_opens_a_session_is_left_alone_by_all_requests() -> None:
    async def forever(_context: Any) -> None:
        await asyncio.Event().wait()

    async with stack(draft_deadline_seconds=0.1, draft_retry_seconds=60) as each:
        each.draft.on_open = forever
        first = exact(await each.generate(max_tokens=TOKENS))
        second = exact(await each.generate(max_tokens=TOKENS))
        assert len(each.draft.sessions) == 1
    assert list(first.fallback_reasons) == ["deadline"]
    assert list(second.fallback_reasons) == ["unavailable"]


def dying(at: int) -> Callable[[Asked, grpc.aio.ServicerContext], Any]:
    async def die(asked: Asked, context: grpc.aio.ServicerContext) -> None:
        if asked.number == at:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    return die


async def test_a_draft_that_dies_is_opened_again_on_the_answer_so_far() -> None:
    async with stack(plan=TWO_RIGHT) as each:
        each.draft.on_propose = dying(at=2)
        stats = exact(await each.generate(max_tokens=TOKENS))
    assert list(stats.fallback_reasons) == ["unavailable"]
    assert stats.fallback_rounds == 1
    assert stats.drafter == "scripted"
    # Rounds 1 and 2 gave 3 tokens each, round 3 without a draft one; the new session starts before the root.
    assert list(each.draft.sessions[1].prompt_token_ids) == [*PROMPT, *EXPECTED[:7]]
    assert [asked.round for asked in each.draft.asked[:5]] == [1, 2, 3, 4, 5]


async def test_after_a_death_the_breaker_keeps_every_request_away_from_the_draft() -> None:
    async with stack(plan=TWO_RIGHT, draft_retry_seconds=60) as each:
        each.draft.on_propose = dying(at=2)
        first = exact(await each.generate(max_tokens=TOKENS))
        second = exact(await each.generate(max_tokens=TOKENS))
    assert len(each.draft.sessions) == 1
    assert second.drafted == 0
    assert second.fallback_rounds == TOKENS - 2
    assert first.accepted == 4


async def test_a_killed_draft_server_costs_speed_only() -> None:
    async with stack(plan=TWO_RIGHT) as each:

        async def kill(record: Any, _context: Any) -> None:
            if len(record.rounds) == 3:
                await each.draft_server.stop(None)

        each.teacher.on_verify = kill
        stats = exact(await each.generate(max_tokens=TOKENS))
    assert list(stats.fallback_reasons) == ["unavailable"]
    assert stats.accepted == 6


async def test_a_drafter_that_reads_features_is_not_reattached_without_them() -> None:
    async with stack(plan=TWO_RIGHT, needs_features=True) as each:
        each.draft.on_propose = dying(at=2)
        stats = exact(await each.generate(max_tokens=TOKENS))
        assert len(each.draft.sessions) == 1
        assert list(stats.fallback_reasons) == ["unavailable"]
        each.draft.on_propose = None
        again = exact(await each.generate(max_tokens=TOKENS))
    assert again.fallback_rounds == 0


INVALID_TREES: dict[str, Callable[[Asked], tree_pb2.TokenTree]] = {
    "no row": lambda asked: tree_pb2.TokenTree(),
    "without its root": lambda asked: tree_pb2.TokenTree(token_ids=[(asked.sequence[-1] + 1) % 256, 5], parents=[0, 0]),
    "cyclic": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 1, 2], parents=[0, 2, 1]),
    "unordered": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 1, 2], parents=[0, 2, 0]),
    "own parent": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 1], parents=[0, 1]),
    "a parent far away": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 1], parents=[0, 2**32 - 1]),
    "parents missing": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 1], parents=[0]),
    "id = vocabulary": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 258], parents=[0, 0]),
    "id = 2^32 - 1": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 2**32 - 1], parents=[0, 0]),
    "equal siblings": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 7, 7], parents=[0, 0, 0]),
    "too many rows": lambda asked: tree_pb2.TokenTree(
        token_ids=[asked.sequence[-1], *range(asked.rows + 1)], parents=[0] * (asked.rows + 2)
    ),
    "too deep": lambda asked: tree_pb2.TokenTree(
        token_ids=[asked.sequence[-1], *range(asked.depth + 1)], parents=[0, *range(asked.depth + 1)]
    ),
    "a score that is no number": lambda asked: tree_pb2.TokenTree(
        token_ids=[asked.sequence[-1], 1], parents=[0, 0], scores=[0, math.nan]
    ),
    "scores missing": lambda asked: tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 1], parents=[0, 0], scores=[0]),
}


@pytest.mark.parametrize("make", INVALID_TREES.values(), ids=INVALID_TREES.keys())
async def test_an_invalid_tree_never_reaches_the_teacher(make: Callable[[Asked], tree_pb2.TokenTree]) -> None:
    async with stack(plan=lambda asked: make(asked) if asked.number % 2 else TWO_RIGHT(asked)) as each:
        response = await each.generate(max_tokens=14, budget=tree_pb2.TreeBudget(rows=3, depth=2))
    stats = exact(response)
    assert list(stats.fallback_reasons) == ["invalid_tree"]
    assert stats.fallback_rounds == 3  # 3 + 1 + 3 + 1 + 3 + 1 + 1 tokens after the first
    assert stats.accepted == 6


async def test_a_rejection_is_a_fallback_and_the_session_opened_anew() -> None:
    def plan(asked: Asked) -> TokenTree | teacher_pb2.Rejection:
        if asked.number == 1:
            return teacher_pb2.Rejection(round=asked.round, code=9, field="committed_length", reason="no")
        return TWO_RIGHT(asked)

    async with stack(plan=plan) as each:
        stats = exact(await each.generate(max_tokens=TOKENS))
    assert (list(stats.fallback_reasons), stats.fallback_rounds) == (["refused"], 1)
    assert len(each.draft.sessions) == 2


@pytest.mark.parametrize("change", [{"round": 1}, {"epoch": 1}, {"round": 99}])
async def test_answers_of_another_round_or_epoch_touch_nothing(change: dict[str, int]) -> None:
    def plan(asked: Asked) -> list[Any]:
        stray = proposal(asked, TokenTree.build([asked.sequence[-1], 1], [0, 0]), **change)
        return (
            [stray, proposal(asked, TWO_RIGHT(asked)), stray] if asked.number else [proposal(asked, TWO_RIGHT(asked))]
        )

    async with stack(plan=plan) as each:
        stats = exact(await each.generate(max_tokens=TOKENS))
    assert stats.fallback_rounds == 0
    assert stats.drafted > stats.accepted > 10


async def test_a_draft_that_proposes_nothing_at_random_is_no_fallback() -> None:
    chance = random.Random(7)

    def plan(asked: Asked) -> TokenTree:
        return TokenTree.root_only(asked.sequence[-1]) if chance.random() < 0.5 else TWO_RIGHT(asked)

    async with stack(plan=plan) as each:
        stats = exact(await each.generate(max_tokens=TOKENS))
    assert stats.fallback_rounds == 0


@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_refused_session_is_a_fallback(code: grpc.StatusCode) -> None:
    async def refuse(context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, "another tokenizer")

    async with stack(draft_retry_seconds=60) as each:
        each.draft.on_open = refuse
        stats = exact(await each.generate(max_tokens=TOKENS))
    assert list(stats.fallback_reasons) == ["refused"]
    assert stats.fallback_rounds == TOKENS - 2


async def test_a_draft_that_starts_later_is_picked_up_within_the_request(usual: Stack) -> None:
    async def refuse(context: grpc.aio.ServicerContext) -> None:
        if len(usual.draft.sessions) < 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting")

    usual.draft.on_open = refuse
    stats = exact(await usual.generate(max_tokens=TOKENS))
    assert (list(stats.fallback_reasons), stats.drafter) == (["unavailable"], "scripted")
    assert stats.accepted > 0


async def test_a_draft_that_proposes_the_end_does_not_end_anything() -> None:
    def plan(asked: Asked) -> TokenTree:
        return TokenTree.build([asked.sequence[-1], 257, 256], [0, 0, 1])

    async with stack(ScriptedTeacher(), plan) as each:
        response = await each.generate(max_tokens=TOKENS)
    assert response.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert exact(response).accepted == 0
