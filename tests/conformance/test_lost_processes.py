"""Real processes that are killed or stopped in the middle of an answer: the rest of it comes, or a status; no hang."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from eagle_pangu.client.client import GenerationClient
from eagle_pangu.serving.configuration import load_settings
from eagle_pangu.serving.trio import Trio, running_trio
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.systems import PROMPT, options, teacher_settings

pytestmark = [MODULE_LOOP, pytest.mark.timeout(240)]

TOKENS = 120
DEADLINE_SECONDS = 2.0
"""The orchestrator's, for one answer of the teacher."""
LONGEST_SECONDS = 60.0
"""After which a test says that the client hangs."""


class Lost:
    """The processes, a client, and the answer that they should give."""

    def __init__(self, trio: Trio, client: GenerationClient, expected: list[int]) -> None:
        self.trio = trio
        self.client = client
        self.expected = expected

    async def stream(self, harm: dict[int, tuple[int, int]]) -> list[int]:
        """The ids of a stream; once so many have come, a process (its pid) gets a signal."""
        ids: list[int] = []
        async with asyncio.timeout(LONGEST_SECONDS):
            async for delta in self.client.generate_stream(request()):
                ids += delta.token_ids
                for after in [after for after in harm if len(ids) >= after]:
                    os.kill(*harm.pop(after))
        assert not harm, "the answer ended before the harm was done"
        return ids


def request(**fields: Any) -> Any:
    return options(PROMPT, **{"max_tokens": TOKENS, "ignore_eos": True, "budget": (4, 2), **fields})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lost(model: Path) -> AsyncIterator[Lost]:
    settings = load_settings(
        overrides={
            "teacher": teacher_settings(model, drain_seconds=1).model_dump(),
            "draft": {"drafter": "ngram", "drain_seconds": 1},
            "orchestrator": {
                "port": 0,
                "draft_deadline_seconds": 0.5,
                "draft_retry_seconds": 0.2,
                "teacher_deadline_seconds": DEADLINE_SECONDS,
                "drain_seconds": 1,
            },
        }
    )
    async with running_trio(settings) as trio, GenerationClient(trio.target) as client:
        expected = await client.generate(request(drafter="none"), seconds=LONGEST_SECONDS)
        assert len(expected.token_ids) == TOKENS
        yield Lost(trio, client, list(expected.token_ids))
        for process in (trio.teacher, trio.draft):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)


async def test_a_stopped_draft_costs_no_token(lost: Lost) -> None:
    pid = lost.trio.draft.pid
    assert await lost.stream({20: (pid, signal.SIGSTOP), 60: (pid, signal.SIGCONT)}) == lost.expected


async def test_a_stopped_teacher_that_goes_on_in_time_is_a_pause(lost: Lost) -> None:
    pid = lost.trio.teacher.pid
    loop = asyncio.get_running_loop()
    loop.call_later(DEADLINE_SECONDS / 2, os.kill, pid, signal.SIGCONT)
    os.kill(pid, signal.SIGSTOP)
    assert await lost.stream({}) == lost.expected


async def test_a_teacher_stopped_for_good_ends_in_a_status(lost: Lost) -> None:
    pid = lost.trio.teacher.pid
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await lost.stream({20: (pid, signal.SIGSTOP)})
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(LONGEST_SECONDS):
                await lost.client.generate(request(max_tokens=3))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await lost.stream({}) == lost.expected


async def test_a_killed_draft_costs_no_token(lost: Lost) -> None:
    assert await lost.stream({20: (lost.trio.draft.pid, signal.SIGKILL)}) == lost.expected


async def test_a_killed_teacher_ends_in_a_status(lost: Lost) -> None:
    """The last test of this module: nobody starts another one here."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lost.stream({20: (lost.trio.teacher.pid, signal.SIGKILL)})
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(LONGEST_SECONDS):
            await lost.client.generate(request(max_tokens=3))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
