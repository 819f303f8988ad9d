"""A shared teacher advises smaller trees: the draft is asked for less, or not at all, and no token changes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from eagle_pangu.evaluation.replay import replay
from eagle_pangu.evaluation.trace_file import read_trace
from eagle_pangu.speculation.tree import TokenTree
from orchestrator import drafting
from protos.v1 import teacher_pb2, tree_pb2
from tests.orchestrator.conftest import Stack, stack
from tests.orchestrator.scripted import Asked, ScriptedTeacher, ids_of, knowing, plain, scrambled

PROMPT = ids_of("prompt")
TOKENS = 40
EXPECTED = plain(scrambled, PROMPT, TOKENS)
ROWS = 8


def advising(*rows: int | None) -> ScriptedTeacher:
    """Advises these for the rounds, one after the other, over and over."""
    teacher = ScriptedTeacher()
    teacher.advise = lambda number: rows[(number - 1) % len(rows)]
    return teacher


def sizes(each: Stack) -> list[int]:
    """Drafted rows of the trees verified."""
    return [len(verify.tree.token_ids) - 1 for session in each.teacher.sessions for verify in session.rounds]


@pytest.mark.parametrize("needs_features", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_random_advice_changes_no_token(seed: int, needs_features: bool) -> None:
    chance, teacher = random.Random(seed), ScriptedTeacher()
    teacher.advise = lambda number: chance.choice([None, 0, 0, 1, 2, 5, 64, 2**32 - 1])
    plan = knowing(scrambled, lambda number: number % 5)
    async with stack(teacher, plan, needs_features=needs_features) as each:
        response = await each.generate(max_tokens=TOKENS)
    assert list(response.token_ids) == EXPECTED
    assert response.speculation.fallback_rounds == 0
    assert 0 < response.speculation.load_limited_rounds < response.speculation.rounds
    assert len(each.draft.sessions) == 1


async def test_the_draft_is_asked_for_as_many_rows_as_are_advised() -> None:
    advice = [3, None, 64, 0, 1]
    async with stack(advising(*advice), knowing(scrambled, lambda number: 0)) as each:
        response = await each.generate(max_tokens=11, budget=tree_pb2.TreeBudget(rows=ROWS, depth=16))
    assert list(response.token_ids) == EXPECTED[:11]
    asked = {question.round: question.rows for question in each.draft.asked}
    assert asked == {1: 3, 2: ROWS, 3: ROWS, 5: 1, 6: 3, 7: ROWS, 8: ROWS}  # round 10 has no use for a draft
    assert sizes(each)[:6] == [3, 8, 7, 0, 1, 3]
    # Rounds 1, 4, 5, 6 and 9; not 10, which would have had no tree without a load either.
    assert response.speculation.load_limited_rounds == 5


@pytest.mark.parametrize("needs_features", [False, True])
async def test_a_draft_that_was_not_asked_is_told_all_with_the_next_question(needs_features: bool) -> None:
    teacher = ScriptedTeacher()
    teacher.advise = lambda number: None if number in (1, 12) else 0
    async with stack(teacher, knowing(scrambled, lambda number: 2), needs_features=needs_features) as each:
        response = await each.generate(max_tokens=TOKENS)
    assert list(response.token_ids) == EXPECTED
    first, second = each.draft.asked  # the scripted draft itself checks lengths, root and features
    assert (first.round, second.round) == (1, 12)
    assert second.sequence == [*PROMPT, *EXPECTED[: 4 + 10]]
    assert response.speculation.fallback_rounds == 0
    assert response.speculation.accepted == 4


async def test_features_do_not_wait_for_a_question_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MOST_WAITING_BYTES", 5 * 8)
    teacher = ScriptedTeacher()
    teacher.advise = lambda number: None if number in (1, 30) else 0
    async with stack(teacher, knowing(scrambled, lambda number: 0), needs_features=True) as each:
        response = await each.generate(max_tokens=TOKENS)
    assert list(response.token_ids) == EXPECTED
    _first, second = each.draft.asked  # the scripted draft itself checks that all features are there by then
    assert second.round == 30
    assert second.features <= 5


async def test_a_draft_that_is_away_is_no_fallback_where_it_is_not_asked() -> None:
    async with stack(advising(0), with_draft=False) as each:
        response = await each.generate(max_tokens=TOKENS, drafter="scripted")
    stats = response.speculation
    assert (stats.fallback_rounds, stats.load_limited_rounds, stats.rounds) == (0, TOKENS - 2, TOKENS - 1)
    assert list(response.token_ids) == EXPECTED


async def test_a_fallback_is_not_load_limited() -> None:
    async with stack(advising(2), with_draft=False) as each:
        stats = (await each.generate(max_tokens=TOKENS, drafter="scripted")).speculation
    assert (stats.fallback_rounds, stats.load_limited_rounds) == (TOKENS - 2, 0)


async def test_a_draft_session_that_dies_while_it_is_not_asked_is_opened_again() -> None:
    teacher = ScriptedTeacher()
    teacher.advise = lambda number: 0 if 2 <= number <= 9 else None
    async with stack(teacher, knowing(scrambled, lambda number: 2)) as each:

        async def die_after_the_first(asked: Asked, context: grpc.aio.ServicerContext) -> None:
            if asked.number == 1:
                await context.abort(grpc.StatusCode.ABORTED, "no message for long")

        each.draft.on_propose = die_after_the_first
        response = await each.generate(max_tokens=TOKENS)
    assert list(response.token_ids) == EXPECTED
    assert len(each.draft.sessions) == 2
    assert response.speculation.fallback_rounds == 1
    assert response.speculation.load_limited_rounds == 8


async def test_a_reopened_teacher_advises_anew() -> None:
    teacher = ScriptedTeacher()
    teacher.advise = lambda number: 1 if len(teacher.sessions) == 1 else 2

    async def lose(record: Any, context: grpc.aio.ServicerContext) -> None:
        if record is teacher.sessions[0] and len(record.rounds) == 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    teacher.on_verify = lose
    async with stack(teacher, knowing(scrambled, lambda number: 0)) as each:
        response = await each.generate(max_tokens=12)
    assert list(response.token_ids) == EXPECTED[:12]
    assert sizes(each)[:-2] == [1, 1, 1, 2, 2, 2, 2, 2, 2]


async def test_the_trace_tells_of_load_and_batch(tmp_path: Path) -> None:
    path, teacher = tmp_path / "trace.jsonl", advising(0, None, 2)
    teacher.timings = teacher_pb2.TeacherTimings(
        forward_us=20, total_us=30, realign_us=7, batch_sessions=3, batch_rows=11
    )
    async with stack(teacher, lambda asked: TokenTree.root_only(asked.sequence[-1]), trace=path) as each:
        response = await each.generate(max_tokens=8)
    (traced,) = read_trace(path)
    assert replay(traced).faults == ()
    assert [line.load_limited for line in traced.rounds] == [True, False, True, True, False, True, False]
    assert {tuple(line.batch.model_dump().items()) for line in traced.rounds} == {
        (("sessions", 3), ("rows", 11), ("realign_us", 7))
    }
    end = json.loads(path.read_text().splitlines()[-1])
    assert end["load_limited_rounds"] == response.speculation.load_limited_rounds == 4
