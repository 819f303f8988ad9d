"""After a thousand other requests the same one has the same answer, and costs the same rounds."""

from __future__ import annotations

import asyncio

from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.mixtures import assert_same_answer
from tests.conformance.systems import PROMPT, System

pytestmark = MODULE_LOOP

OTHERS = 1000


async def test_the_same_seed_after_a_thousand_other_requests_gives_the_same_tokens(self_draft: System) -> None:
    asked = {"seed": 5, "temperature": 1.0, "max_tokens": 12, "budget": (4, 3)}
    before = {drafter: await self_draft.ask(PROMPT, drafter=drafter, **asked) for drafter in ("none", "standalone")}
    numbers = iter(range(OTHERS))

    async def work() -> None:
        for number in numbers:
            await self_draft.ask([number % 256, number // 256], drafter="none", max_tokens=1, temperature=1.0)

    await asyncio.gather(*(work() for _ in range(8)))
    for drafter, expected in before.items():
        answer = await self_draft.ask(PROMPT, drafter=drafter, **asked)
        assert_same_answer(answer, expected)
        assert answer.speculation.rounds == expected.speculation.rounds
        assert answer.speculation.accepted == expected.speculation.accepted
