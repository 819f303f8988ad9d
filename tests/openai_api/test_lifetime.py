"""Requests that end early, requests that are found again by their id, and the process from start to drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from typer.testing import CliRunner

from eagle_pangu.cli.main import app as cli
from eagle_pangu.serving.bootstrap import Server, running
from eagle_pangu.serving.settings import ServerSettings
from tests.openai_api.conftest import Stack, fake_stack, front
from tests.openai_api.fake_generation import MODEL, FakeGeneration, FakeOrchestrator

ASKED: dict[str, Any] = {"model": MODEL, "prompt": "a"}


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(10):
        await event.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_while_it_waits_cancels_the_call(stack: Stack, stream: bool) -> None:
    stack.fake.gate.clear()
    with capture_logs() as logs:
        async with httpx2.AsyncClient() as client:
            call = asyncio.create_task(client.post(f"{stack.url}/v1/completions", json={**ASKED, "stream": stream}))
            await soon(stack.fake.begun)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await soon(stack.fake.cancelled)
    assert "request failed" not in {line["event"] for line in logs}


async def test_a_client_that_leaves_a_stream_cancels_the_call(stack: Stack) -> None:
    stack.fake.gate.clear()
    stack.fake.gate_after = 1
    stream = await stack.client.completions.create(**ASKED, stream=True)
    assert (await anext(aiter(stream))).choices[0].text == "dé"
    await stream.close()
    await soon(stack.fake.cancelled)


async def test_a_client_that_reads_nothing_does_not_hold_a_call_for_ever() -> None:
    async with fake_stack(write_seconds=0.2) as stack:
        stack.fake.said, stack.fake.flood = "x" * 3000, 100_000
        host, port = stack.url.removeprefix("http://").split(":")
        _reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = json.dumps({**ASKED, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with capture_logs() as logs:
            writer.write(head.encode() + body)
            await soon(stack.fake.ended)
        writer.close()
    assert "client stalled" in {line["event"] for line in logs}


async def test_the_request_id_goes_in_and_out_and_to_the_orchestrator(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.url, headers={"x-request-id": "mine-1"}) as client:
        whole = await client.post("/v1/completions", json=ASKED)
        streamed = await client.post("/v1/completions", json={**ASKED, "stream": True})
        refused = await client.post("/v1/completions", json={})
        missing = await client.get("/v1/models/none")
    responses = (whole, streamed, refused, missing)
    assert [each.headers["x-request-id"] for each in responses] == ["mine-1"] * 4
    assert [each.status_code for each in responses] == [200, 200, 400, 404]
    assert [options.request_id for options in stack.fake.asked] == ["mine-1"] * 2
    assert whole.json()["id"] == "cmpl-mine-1"


async def test_a_request_without_an_id_gets_one_of_its_own(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.url) as client:
        ids = [(await client.post("/v1/completions", json=ASKED)).headers["x-request-id"] for _ in range(2)]
    assert [options.request_id for options in stack.fake.asked] == ids
    assert len(set(ids)) == 2
    assert all(ids)


async def test_an_impossible_request_id_is_refused_by_the_name_of_its_header(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=stack.url, headers={"x-request-id": "x" * 129}) as client:
        response = await client.post("/v1/completions", json=ASKED)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-id"


async def test_the_log_tells_the_user_and_never_the_prompt(stack: Stack) -> None:
    with capture_logs(processors=[merge_contextvars]) as logs:
        asked = {**ASKED, "prompt": "the secret", "user": "u-1"}
        async with httpx2.AsyncClient(base_url=stack.url, headers={"x-request-id": "r"}) as client:
            await client.post("/v1/completions", json=asked)
            await client.get("/health")
    (ended,) = [line for line in logs if line["event"] == "request ended" and line["path"] != "/health"]
    assert (ended["user"], ended["status"]) == ("u-1", 200)
    assert "secret" not in str(logs)


@asynccontextmanager
async def starting_orchestrator() -> AsyncIterator[tuple[Server, str]]:
    """An orchestrator that answers health, and is not ready."""
    server = Server(FakeOrchestrator(FakeGeneration()), ServerSettings())
    try:
        yield server, f"127.0.0.1:{await server.bind()}"
    finally:
        await server.stop(drain_seconds=0)


async def test_health_is_200_only_while_the_orchestrator_is_serving() -> None:
    async with starting_orchestrator() as (server, target), front(target) as url, httpx2.AsyncClient() as client:
        response = await client.get(f"{url}/health")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        await server.start()
        response = await client.get(f"{url}/health")
        assert (response.status_code, response.json()) == (200, {"status": "serving"})


def process(*flags: str, **environment: str) -> subprocess.Popen[str]:
    """The front as `eagle-pangu http` starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "eagle_pangu.cli.main", "http", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_drains_at_a_signal_and_ends_with_0(number: signal.Signals) -> None:
    fake = FakeGeneration()
    async with running(FakeOrchestrator(fake)) as port:
        front_process = process("--target", f"127.0.0.1:{port}", EAGLE_PANGU_HTTP__PORT="0")
        try:
            assert front_process.stdout is not None
            word, address = (await asyncio.to_thread(front_process.stdout.readline)).split()
            assert word == "listening"
            fake.gate.clear()
            async with httpx2.AsyncClient(base_url=f"http://{address}") as client:
                call = asyncio.create_task(client.post("/v1/completions", json={**ASKED, "stream": True}))
                await soon(fake.begun)
                front_process.send_signal(number)
                await refusing_connections(address)
                await asyncio.sleep(0.3)  # uvicorn takes 0.1 s to a drain of no time at all
                fake.gate.set()
                response = await call
            assert response.text.endswith("data: [DONE]\n\n")
            assert await asyncio.to_thread(front_process.wait, 20) == 0
        finally:
            front_process.kill()
            _, errors = await asyncio.to_thread(front_process.communicate)
    assert "Traceback" not in errors


async def test_the_drain_ends_when_its_time_is_over() -> None:
    fake = FakeGeneration()
    async with running(FakeOrchestrator(fake)) as port:
        front_process = process("--target", f"127.0.0.1:{port}", "--port", "0", "--drain-seconds", "1")
        try:
            assert front_process.stdout is not None
            address = (await asyncio.to_thread(front_process.stdout.readline)).split()[1]
            fake.gate.clear()
            async with httpx2.AsyncClient(base_url=f"http://{address}") as client:
                call = asyncio.create_task(client.post("/v1/completions", json=ASKED))
                await soon(fake.begun)
                front_process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(front_process.wait, 20) == 0
                await soon(fake.cancelled)
                await asyncio.gather(call, return_exceptions=True)
        finally:
            front_process.kill()
            await asyncio.to_thread(front_process.communicate)


async def refusing_connections(address: str) -> None:
    """Return once the process takes no new connection."""
    host, port = address.split(":")
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:  # refused; or reset, where the socket closed upon one that waited to be accepted
                return
            writer.close()
            await asyncio.sleep(0.02)


def test_a_bad_setting_ends_the_start_with_2_and_names_the_field() -> None:
    with process("--port", "many") as front_process:
        _, errors = front_process.communicate(timeout=60)
    assert front_process.returncode == 2
    assert "http.port: " in errors
    assert "(from --http.port)" in errors


async def test_a_port_in_use_ends_the_start_with_1() -> None:
    async with running(FakeOrchestrator(FakeGeneration())) as port:
        with process("--port", str(port)) as front_process:
            _, errors = await asyncio.to_thread(front_process.communicate, timeout=60)
    assert front_process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in errors


def test_without_the_http_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "eagle_pangu.openai_api.main", raising=False)
    result = CliRunner().invoke(cli, ["http", "--port", "0"])
    assert result.exit_code == 1
    assert "uvicorn is not installed; it comes with: pip install 'eagle-pangu[http]'" in result.output
