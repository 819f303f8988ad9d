"""A draft that is absent, dead or frozen costs speed only, and the response says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.end_to_end.conftest import chat, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("harm", [kill, freeze])
async def test_a_draft_lost_in_the_middle_of_an_answer_changes_no_token(
    prompts: list[str], harm: Callable[[int], None]
) -> None:
    settings = {"draft_deadline_seconds": 1.0, "draft_retry_seconds": 60.0}
    async with serving(teacher={"dtype": "float32"}, orchestrator=settings) as (trio, client):
        plain = await client.generate(chat(prompts[0], "none"))
        token_ids: list[int] = []
        harmed = False
        try:
            async for delta in client.generate_stream(chat(prompts[0], "ngram")):
                token_ids += delta.token_ids
                if len(token_ids) > 5 and not harmed:
                    harmed = True
                    harm(trio.draft.pid)
                final = delta
        finally:
            if harm is freeze:
                os.kill(trio.draft.pid, signal.SIGCONT)
        assert token_ids == list(plain.token_ids)
        assert final.speculation.fallback_rounds > 0
        assert set(final.speculation.fallback_reasons) <= {"deadline", "unavailable"}
        assert final.speculation.fallback_reasons


async def test_an_absent_draft_is_reported_and_decoding_goes_on(prompts: list[str]) -> None:
    settings = {"draft_retry_seconds": 60.0}
    async with serving(teacher={"dtype": "float32"}, orchestrator=settings) as (trio, client):
        plain = await client.generate(chat(prompts[1], "none"))
        kill(trio.draft.pid)
        answer = await client.generate(chat(prompts[1], "ngram"))
        assert answer.token_ids == plain.token_ids
        # In the last round one token is left: nobody asks a draft for it, so nothing is lost.
        assert answer.speculation.fallback_rounds == answer.speculation.rounds - 1
        assert list(answer.speculation.fallback_reasons) == ["unavailable"]
