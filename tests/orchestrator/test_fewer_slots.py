"""Fewer slots than answers: they come one after the other, whatever the teacher refuses meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from orchestrator import answers
from tests.orchestrator.conftest import Stack
from tests.orchestrator.test_answers import GREEDY, TOKENS, answers_of, streamed


class Refusing:
    """A teacher that refuses openings by their number, and holds each other one's prompt until it is told to go on."""

    def __init__(self, stack: Stack, *refused: int) -> None:
        self._stack = stack
        self.refused_numbers: Sequence[int] = refused
        self._asked = 0
        self.reading = asyncio.Semaphore(0)
        self.refused = asyncio.Semaphore(0)
        self.go_on: dict[int, asyncio.Event] = {}
        stack.teacher.on_open = self

    async def __call__(self, _record: Any, context: grpc.aio.ServicerContext) -> None:
        number = self._asked
        self._asked += 1
        if number in self.refused_numbers:
            self.refused.release()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")
        if number in self.go_on:
            self.reading.release()
            await self.go_on[number].wait()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(answers, "LONGEST_PAUSE_SECONDS", 0.002)


@pytest.mark.parametrize("slots", [1, 2])
async def test_with_fewer_slots_than_answers_they_come_one_after_the_other(usual: Stack, slots: int) -> None:
    usual.teacher.slots = asyncio.Semaphore(slots)
    whole, parts = await asyncio.gather(usual.generate(max_tokens=TOKENS, n=5), usual.stream(max_tokens=TOKENS, n=3))
    assert [list(answer.token_ids) for answer in answers_of(whole)] == [GREEDY] * 5
    assert [[t for part in streamed(parts, i) for t in part.token_ids] for i in range(3)] == [GREEDY] * 3


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("tokens", [1, TOKENS])
async def test_one_that_is_refused_while_another_ones_prompt_is_read_waits_for_it(usual: Stack, tokens: int) -> None:
    """However often it is refused: the first answer may be over by then, and no other one has given anything yet."""
    teacher = Refusing(usual, *range(2, 40))
    teacher.go_on = {1: asyncio.Event()}
    generating = asyncio.create_task(usual.generate(max_tokens=tokens, n=3))
    async with asyncio.timeout(20):
        await teacher.reading.acquire()
        for _ in range(answers.TRIES + 3):
            await teacher.refused.acquire()
    teacher.refused_numbers = ()
    teacher.go_on[1].set()
    response = await generating
    assert [list(answer.token_ids) for answer in answers_of(response)] == [GREEDY[:tokens]] * 3
    await usual.idle()


@pytest.mark.usefixtures("short_pauses")
async def test_a_slot_that_comes_free_late_is_asked_for_again(usual: Stack) -> None:
    """The teacher frees it after the answer is over: nobody holds any then, and all that are left are refused."""
    Refusing(usual, 1, 2, 3, 4, 6, 7, 9)
    response = await usual.generate(max_tokens=1, n=3)
    assert [list(answer.token_ids) for answer in answers_of(response)] == [GREEDY[:1]] * 3


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("kind", ["generate", "stream"])
async def test_a_teacher_that_is_full_for_good_is_told(usual: Stack, kind: str) -> None:
    Refusing(usual, *range(1, 1000))
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await getattr(usual, kind)(max_tokens=TOKENS, n=3)
    assert full.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(usual.teacher.sessions) > 1 + answers.TRIES
    await usual.idle()


async def test_the_first_answer_is_not_asked_for_again(usual: Stack) -> None:
    Refusing(usual, 0)
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await usual.generate(max_tokens=TOKENS, n=3)
    assert full.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(usual.teacher.sessions) == 1
