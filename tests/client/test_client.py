"""The client adds nothing and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from eagle_pangu.client.client import GenerationClient, Violation, generate, violations_of
from protos.v1 import generation_pb2, generation_pb2_grpc
from tests.orchestrator.conftest import Stack, serve, stack

Options = generation_pb2.GenerationOptions


@pytest.fixture
async def each() -> AsyncIterator[Stack]:
    async with stack() as running:
        yield running


async def test_unary_and_stream_answer_alike(each: Stack) -> None:
    options = Options(prompt="prompt", max_tokens=20)
    async with GenerationClient(each.target) as client:
        whole = await client.generate(options)
        parts = [part async for part in client.generate_stream(options)]
    assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
    assert "".join(part.text for part in parts) == whole.text


async def test_model_info_is_there(each: Stack) -> None:
    async with GenerationClient(each.target) as client:
        assert (await client.model_info(seconds=5)).default_drafter == "scripted"


async def test_a_blocking_call_needs_no_event_loop(each: Stack) -> None:
    response = await asyncio.to_thread(generate, each.target, Options(prompt="prompt", max_tokens=5))
    assert len(response.token_ids) == 5


async def test_a_stream_left_early_is_cancelled(each: Stack) -> None:
    async with GenerationClient(each.target) as client:
        deltas = client.generate_stream(Options(prompt="prompt", max_tokens=200))
        await anext(deltas)
        await deltas.aclose()
        await each.idle()


async def test_a_refused_request_tells_its_violations(each: Stack) -> None:
    async with GenerationClient(each.target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.generate(Options(prompt="prompt", max_tokens=0, temperature=-1))
    assert violations_of(error.value) == [
        Violation("options.max_tokens", "expected 1 to 4096, got 0"),
        Violation("options.temperature", "expected 0 (greedy) or a number in [1e-06, 100], got -1.0"),
    ]


async def test_a_call_may_have_a_limit_in_seconds() -> None:
    class Silent(generation_pb2_grpc.GenerationServiceServicer):
        async def Generate(self, request, context):  # noqa: N802
            await asyncio.Event().wait()

    server, port = await serve(generation_pb2_grpc.add_GenerationServiceServicer_to_server, Silent())
    async with GenerationClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await client.generate(Options(prompt="x"), seconds=0.1)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert violations_of(late.value) == []
    await server.stop(None)
