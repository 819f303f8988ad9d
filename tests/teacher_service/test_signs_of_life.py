"""While a prompt waits its turn the teacher says that it lives; while its model hangs it says nothing."""

from __future__ import annotations

import asyncio

import pytest

from tests.teacher_service.fakes import FakeEngine, Gate, answer
from tests.teacher_service.peer import serving

PROMPT = [11, 5, 80, 2, 41, 7]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teacher_service.service.SIGN_OF_LIFE_SECONDS", 0.02)


async def test_a_prompt_that_waits_is_told_of_and_then_read() -> None:
    engine = FakeEngine()
    gate = Gate(engine, "prefill")
    async with serving(engine) as served:
        session = served.session()
        await session.send_open(PROMPT)
        assert (await session.read()).HasField("opened")
        for _ in range(3):
            sign = await session.read()
            assert sign.WhichOneof("message") == "reading"
            assert sign.reading.committed_length == 0
        gate.let(9)
        while (last := await session.read()).WhichOneof("message") == "reading":
            pass
        assert last.prefilled.next_token_id == answer(PROMPT, 1)[0]


async def test_a_model_that_hangs_gives_no_sign() -> None:
    engine = FakeEngine()
    gate = Gate(engine, "prefill")
    async with serving(engine, stall_seconds=0.05) as served:
        session = served.session()
        await session.send_open(PROMPT)
        assert (await session.read()).HasField("opened")
        await gate.reached()
        await asyncio.sleep(0.1)  # past stall_seconds
        while True:
            try:
                async with asyncio.timeout(0.2):  # ten signs' time
                    await session.read()
            except TimeoutError:
                break
        gate.let(9)
