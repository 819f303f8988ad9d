"""Both clients, at an orchestrator: they add nothing and lose nothing, and who leaves ends the call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from eagle_pangu.client.client import GenerationClient, SyncGenerationClient, Violation, violations_of
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


async def test_blocking_calls_answer_alike(each: Stack) -> None:
    options = Options(prompt="prompt", max_tokens=20)

    def ask() -> tuple[generation_pb2.GenerateResponse, list[generation_pb2.GenerateStreamResponse], str]:
        with SyncGenerationClient(each.target) as client:
            return (
                client.generate(options),
                list(client.generate_stream(options)),
                client.model_info(seconds=5).default_drafter,
            )

    blocking, parts, drafter = await asyncio.to_thread(ask)
    async with GenerationClient(each.target) as client:
        whole = await client.generate(options)
    assert [token for part in parts for token in part.token_ids] == list(whole.token_ids) == list(blocking.token_ids)
    assert "".join(part.text for part in parts) == whole.text == blocking.text
    assert drafter == "scripted"


async def test_threads_share_a_blocking_client(each: Stack) -> None:
    together = threading.Barrier(8)

    def ask(client: SyncGenerationClient, prompt: str) -> list[int]:
        deltas = client.generate_stream(Options(prompt=prompt, max_tokens=20))
        ids = list(next(deltas).token_ids)
        together.wait(20)  # all eight streams are open
        return ids + [token for delta in deltas for token in delta.token_ids]

    loop = asyncio.get_running_loop()
    # Threads of their own: the orchestrator, in this process too, tokenises in those of the loop.
    with ThreadPoolExecutor(8) as threads, SyncGenerationClient(each.target) as client:
        asked = [loop.run_in_executor(threads, ask, client, f"prompt {number}") for number in range(8)]
        answers = await asyncio.gather(*asked)
    for number, answer in enumerate(answers):
        assert answer == (await each.generate(prompt=f"prompt {number}", max_tokens=20)).token_ids


async def test_a_blocking_stream_left_early_is_cancelled(each: Stack) -> None:
    def leave(client: SyncGenerationClient) -> None:
        for _ in client.generate_stream(Options(prompt="prompt", max_tokens=200)):
            break

    with SyncGenerationClient(each.target) as client:
        await asyncio.to_thread(leave, client)
        await each.idle()


async def test_closing_a_blocking_client_ends_the_calls_of_other_threads() -> None:
    began = asyncio.Event()

    class Silent(generation_pb2_grpc.GenerationServiceServicer):
        async def Generate(self, request, context):  # noqa: N802
            began.set()
            await asyncio.Event().wait()

    server, port = await serve(generation_pb2_grpc.add_GenerationServiceServicer_to_server, Silent())
    with SyncGenerationClient(f"127.0.0.1:{port}") as client:
        call = asyncio.create_task(asyncio.to_thread(client.generate, Options(prompt="x")))
        await began.wait()
    with pytest.raises(grpc.RpcError) as ended:
        await call
    assert ended.value.code() == grpc.StatusCode.CANCELLED
    await server.stop(None)


async def test_a_stream_left_early_is_cancelled(each: Stack) -> None:
    async with GenerationClient(each.target) as client:
        deltas = client.generate_stream(Options(prompt="prompt", max_tokens=200))
        await anext(deltas)
        await deltas.aclose()
        await each.idle()


async def test_a_refused_request_tells_its_violations(each: Stack) -> None:
    refused = Options(prompt="prompt", max_tokens=0, temperature=-1)
    async with GenerationClient(each.target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.generate(refused)
    with SyncGenerationClient(each.target) as blocking:
        with pytest.raises(grpc.RpcError) as blocking_error:
            await asyncio.to_thread(blocking.generate, refused)
        with pytest.raises(grpc.RpcError) as stream_error:
            await asyncio.to_thread(list, blocking.generate_stream(refused))
    expected = [
        Violation("options.max_tokens", "expected 1 to 4096, got 0"),
        Violation("options.temperature", "expected 0 (greedy) or a number in [1e-06, 100], got -1.0"),
    ]
    assert [violations_of(each.value) for each in (error, blocking_error, stream_error)] == [expected] * 3


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
