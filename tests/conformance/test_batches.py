"""Batches: sessions of very different lengths, drafters and fates side by side; each as on its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

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
    """Four times as many as there are slots. Rows without a tree stand beside rows with one.

    What drafting gained is the same too, but where the teacher asked for smaller trees because it was shared.
    """
    alone = [await self_draft.send(session(number)) for number in range(SESSIONS)]
    together = await asyncio.gather(*(self_draft.send(session(number)) for number in range(SESSIONS)))
    for answer, expected in zip(together, alone, strict=True):
        assert_same_answer(answer, expected)
        assert answer.speculation.fallback_rounds == expected.speculation.fallback_rounds == 0
        if answer.speculation.load_limited_rounds == 0:
            for name in ("rounds", "drafted", "accepted"):
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


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[0, 1])
async def narrow(engine: Engine, model: Path, request: pytest.FixtureRequest) -> AsyncIterator[System]:
    """Two slots, where nobody may wait for one, or one at a time."""
    settings = teacher_settings(model, slots=2, queue_limit=request.param)
    async with system(engine, None, settings, n_limit=12) as each:
        yield each


MANY: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(self_draft: System) -> list[list[int]]:
    """The answers of seeds 0 to 12, teacher-only."""
    return [
        list((await self_draft.ask(seed=seed, drafter="none", max_tokens=12, **MANY)).token_ids) for seed in range(13)
    ]


@pytest.mark.parametrize("tokens", [1, 2, 12])
@pytest.mark.parametrize("n", [3, 4, 8, 12])
async def test_more_answers_than_slots_come_one_after_the_other(
    narrow: System, alone: list[list[int]], n: int, tokens: int
) -> None:
    """Whatever is refused meanwhile: what finds no room is asked again when a sibling is over."""
    for seed in (0, 1):
        whole = await narrow.ask(n=n, seed=seed, max_tokens=tokens, **MANY)
        deltas = await narrow.stream(n=n, seed=seed, max_tokens=tokens, **MANY)
        answers = [whole, *whole.further_answers]
        for index, answer in enumerate(answers):
            parts = [delta for delta in deltas if delta.index == index]
            streamed = [token for part in parts for token in part.token_ids]
            assert list(answer.token_ids) == streamed == alone[seed + index][:tokens]
        assert whole.usage.completion_tokens == deltas[-1].usage.completion_tokens == n * tokens
    await narrow.all_slots_free()


@pytest.mark.parametrize("after", [0, 1, 5, 9])
async def test_answers_given_up_half_way_free_every_slot(narrow: System, after: int) -> None:
    async with aclosing(narrow.client.generate_stream(options(n=8, max_tokens=3, **MANY))) as deltas:
        for _ in range(after):
            await anext(deltas)
    await narrow.all_slots_free()
    assert len((await narrow.ask(n=2, max_tokens=2, **MANY)).further_answers) == 1


@pytest.mark.parametrize("seconds", [0.05, 0.3])
async def test_answers_past_their_deadline_free_every_slot(narrow: System, seconds: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await narrow.client.generate(options(n=12, max_tokens=200, **MANY), seconds=seconds)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await narrow.all_slots_free()
