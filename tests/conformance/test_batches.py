"""Batches: sessions of very different lengths, drafters and fates side by side; each as on its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from eagle_pangu.speculation.engine import Engine
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.mixtures import DRAFTERS, assert_same_answer
from tests.conformance.systems import LETTERS, PROMPT, System, options, system, teacher_settings

pytestmark = MODULE_LOOP

SESSIONS = 32


def session(number: int) -> Any:
    """From 1 to 30 tokens after prompts of 1 to 90, by every drafter and none; every other one is sampled."""
    fields: dict[str, Any] = {"max_tokens": (1, 3, 9, 30)[number % 4], "budget": (1 + number % 8, 1 + number % 5)}
    if number % 2:
        fields |= {"temperature": 0.9, "seed": number}
    if number % 3 == 0:
        fields |= {"allowed_token_ids": LETTERS[: 4 + number], "repetition_penalty": 1.2, "logprobs": 1}
    prompt = [(number * 7 + place) % 256 for place in range(1 + (number * 17) % 90)]
    return options(prompt, drafter=DRAFTERS[number % len(DRAFTERS)], **fields)


async def test_each_of_32_very_different_sessions_at_once_is_as_on_its_own(self_draft: System) -> None:
    """Four times as many as there are slots. Rows without a tree stand beside rows with one."""
    alone = [await self_draft.send(session(number)) for number in range(SESSIONS)]
    together = await asyncio.gather(*(self_draft.send(session(number)) for number in range(SESSIONS)))
    for answer, expected in zip(together, alone, strict=True):
        assert_same_answer(answer, expected)
        for name in ("rounds", "drafted", "accepted", "fallback_rounds"):
            assert getattr(answer.speculation, name) == getattr(expected.speculation, name), name
    await self_draft.all_slots_free()


async def test_what_is_finished_leaves_at_once(self_draft: System) -> None:
    """Long answers hold all slots but one: short ones pass through that one, one after the other, meanwhile."""
    order: list[str] = []

    async def run(name: str, tokens: int) -> None:
        await self_draft.ask(PROMPT, drafter="none", max_tokens=tokens, ignore_eos=True)
        order.append(name)

    long = [asyncio.create_task(run("long", 70)) for _ in range(self_draft.teacher.slots.total - 1)]
    while self_draft.teacher.slots.in_use < len(long):  # noqa: ASYNC110 -- the service tells nobody
        await asyncio.sleep(0.005)
    await asyncio.gather(*(run("short", 2) for _ in range(4)), *long)
    assert order[:4] == ["short"] * 4


async def test_a_session_that_fails_leaves_its_neighbours_as_they_are(self_draft: System) -> None:
    alone = await self_draft.ask(PROMPT, max_tokens=24)
    neighbours = [asyncio.create_task(self_draft.ask(PROMPT, max_tokens=24)) for _ in range(3)]
    refused = [self_draft.ask([5] * 10_000), self_draft.ask([260]), self_draft.ask(PROMPT, temperature=-1)]
    assert all(isinstance(each, Exception) for each in await asyncio.gather(*refused, return_exceptions=True))
    for answer in await asyncio.gather(*neighbours):
        assert_same_answer(answer, alone)


async def test_more_answers_than_slots_come_one_after_the_other(engine: Engine, model: Path) -> None:
    """Also where nobody may wait at the teacher: what finds no room is asked again when a sibling is over."""
    async with system(engine, None, teacher_settings(model, slots=2, queue_limit=0)) as narrow:
        asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        response = await narrow.ask(PROMPT, n=5, seed=3, **asked)
        answers = [response, *response.further_answers]
        for index, answer in enumerate(answers):
            alone = await narrow.ask(PROMPT, seed=3 + index, **asked)
            assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)
        assert response.usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)
        await narrow.all_slots_free()
