"""Sessions end with their request, however it ends; many requests at once do not touch each other."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from eagle_pangu.serving.errors import details_of
from protos.v1 import generation_pb2, tree_pb2
from tests.orchestrator.conftest import Stack, options, stack
from tests.orchestrator.scripted import Asked, ids_of, knowing, plain, scrambled

PROMPT = ids_of("prompt")


class Gate:
    """Holds the verification of one round of every session until it is opened."""

    def __init__(self, round_number: int) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self._round = round_number

    async def __call__(self, record: Any, _context: Any) -> None:
        if len(record.rounds) == self._round:
            self.reached.set()
            await self.opened.wait()


def stream_request(**fields: Any) -> generation_pb2.GenerateStreamRequest:
    return generation_pb2.GenerateStreamRequest(options=options(**fields))


async def test_a_finished_request_has_freed_both_sessions(usual: Stack) -> None:
    await usual.generate(max_tokens=20)
    await usual.idle()


@pytest.mark.parametrize("kind", ["Generate", "GenerateStream"])
async def test_a_client_that_goes_away_frees_both_sessions_at_once(usual: Stack, kind: str) -> None:
    gate = Gate(3)
    usual.teacher.on_verify = gate
    if kind == "Generate":
        call = usual.stub.Generate(generation_pb2.GenerateRequest(options=options(max_tokens=50)))
    else:
        call = usual.stub.GenerateStream(stream_request(max_tokens=50))
    await gate.reached.wait()
    assert usual.teacher.active == usual.draft.active == 1
    call.cancel()
    await usual.idle()


async def test_a_client_that_goes_away_while_the_draft_thinks_frees_both_sessions(usual: Stack) -> None:
    thinking = asyncio.Event()

    async def think(_asked: Asked, _context: Any) -> None:
        thinking.set()
        await asyncio.Event().wait()

    usual.draft.on_propose = think
    call = usual.stub.GenerateStream(stream_request(max_tokens=50))
    await thinking.wait()
    call.cancel()
    await usual.idle()


async def test_a_client_that_goes_away_during_prefill_frees_both_sessions(usual: Stack) -> None:
    opened = asyncio.Event()

    async def read_for_ever(_record: Any, _context: Any) -> None:
        opened.set()
        await asyncio.Event().wait()

    usual.teacher.on_open = read_for_ever
    call = usual.stub.GenerateStream(stream_request(max_tokens=50))
    await opened.wait()
    call.cancel()
    await usual.idle()


async def test_a_deadline_that_passes_frees_both_sessions(usual: Stack) -> None:
    usual.teacher.on_verify = Gate(3)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await usual.stub.Generate(generation_pb2.GenerateRequest(options=options(max_tokens=50)), timeout=0.3)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await usual.idle()


async def test_streams_cancelled_at_random_points_leave_nothing_behind(usual: Stack) -> None:
    chance = random.Random(5)

    async def one(after: int) -> None:
        call = usual.stub.GenerateStream(stream_request(max_tokens=60))
        for _ in range(after):
            await call.read()
        call.cancel()

    await asyncio.gather(*(one(chance.randrange(12)) for _ in range(60)))
    await usual.service.drained()
    await usual.idle()
    assert list((await usual.generate(max_tokens=9)).token_ids) == plain(scrambled, PROMPT, 9)


async def test_one_request_over_the_limit_is_refused_with_a_delay() -> None:
    gate = Gate(2)
    async with stack(max_concurrent=2) as each:
        each.teacher.on_verify = gate
        running = [asyncio.create_task(each.generate(max_tokens=20)) for _ in range(2)]
        await gate.reached.wait()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await each.generate(max_tokens=20)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        status = details_of(refused.value)
        assert status is not None
        assert status.details[0].Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        gate.opened.set()
        for task in running:
            assert list((await task).token_ids) == plain(scrambled, PROMPT, 20)
        await each.generate(max_tokens=20)


async def test_draining_waits_for_the_last_request(usual: Stack) -> None:
    gate = Gate(2)
    usual.teacher.on_verify = gate
    running = asyncio.create_task(usual.generate(max_tokens=10))
    await gate.reached.wait()
    drained = asyncio.create_task(usual.service.drained())
    await asyncio.sleep(0)
    assert not drained.done()
    gate.opened.set()
    await running
    async with asyncio.timeout(5):
        await drained


async def test_32_requests_at_once_equal_their_own_runs_alone() -> None:
    async with stack(plan=knowing(scrambled, lambda number: number % 5)) as each:
        wanted = [(f"prompt {number}" * (1 + number % 7), 1 + (number * 7) % 45, number % 9) for number in range(32)]

        async def one(prompt: str, max_tokens: int, depth: int) -> list[int]:
            budget = tree_pb2.TreeBudget(rows=8, depth=depth)
            return list((await each.generate(prompt=prompt, max_tokens=max_tokens, budget=budget)).token_ids)

        answers = await asyncio.gather(*(one(*each_wanted) for each_wanted in wanted))
        await each.idle()
    for (prompt, max_tokens, _), answer in zip(wanted, answers, strict=True):
        assert answer == plain(scrambled, ids_of(prompt), max_tokens)
