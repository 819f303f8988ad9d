"""The one law, over the grid: every request has one answer, whatever drafts and whoever is served beside it."""

from __future__ import annotations

import asyncio
import os

import pytest

from protos.v1 import generation_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.mixtures import DRAFTERS, assert_same_answer, mixture
from tests.conformance.systems import System

pytestmark = [MODULE_LOOP, pytest.mark.timeout(1800)]

WHOLE_GRID = "EAGLE_PANGU_WHOLE_GRID"
"""Set in the environment: every request by every drafter at every concurrency, with longer answers; takes minutes."""

REQUESTS = 200
CONCURRENCY = (1, 4, 8)
whole = bool(os.environ.get(WHOLE_GRID))
tokens = 16 if whole else 4


async def answers_of(
    each: System, numbers: list[int], drafter: str, at_once: int
) -> dict[int, generation_pb2.GenerateResponse]:
    """Of these requests by one drafter, so many at once all the time."""
    answers: dict[int, generation_pb2.GenerateResponse] = {}
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            answers[number] = await each.send(mixture(number, tokens, seeded=True), drafter=drafter)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return answers


async def test_200_seeded_requests_have_one_answer_with_any_drafter_at_any_concurrency(self_draft: System) -> None:
    """A slice: each request of two of the four drafters, which have a share of their requests at each concurrency.

    The first requests are asked again at the end: after hundreds of others their answers are what they were.
    """
    numbers = list(range(REQUESTS))
    plain = await answers_of(self_draft, numbers, "none", 1)
    accepted = dict.fromkeys(DRAFTERS[1:], 0)
    for turn, drafter in enumerate(DRAFTERS[1:]):
        mine = [number for number in numbers if (number - turn) % (len(DRAFTERS) - 1) < 2]
        for share, at_once in enumerate(CONCURRENCY):
            asked = numbers if whole else mine[share :: len(CONCURRENCY)]
            answers = await answers_of(self_draft, asked, drafter, at_once)
            for number, answer in answers.items():
                assert_same_answer(answer, plain[number])
                assert answer.speculation.fallback_rounds == 0
                accepted[drafter] += answer.speculation.accepted
    for at_once in CONCURRENCY[1:]:
        again = await answers_of(self_draft, numbers if whole else numbers[: 4 * at_once], "none", at_once)
        for number, answer in again.items():
            assert_same_answer(answer, plain[number])
            assert answer.speculation.drafted == 0
    assert min(accepted[drafter] for drafter in ("ngram", "standalone", "hybrid")) > 0, accepted
    await self_draft.all_slots_free()
