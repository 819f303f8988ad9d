"""The life of a server: start, health, gate, reflection, limits, drain, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from eagle_pangu import serving
from eagle_pangu.serving.bootstrap import Server, StartError, channel, running
from eagle_pangu.serving.health import wait_until_serving
from eagle_pangu.serving.settings import ServerSettings
from tests.serving.echo_service import NAME, EchoService, EchoStub, ask

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WATCHES: list[Any] = []


@contextlib.asynccontextmanager
async def connected(port: int, settings: ServerSettings | None = None) -> AsyncIterator[grpc.aio.Channel]:
    async with channel(f"127.0.0.1:{port}", settings or ServerSettings()) as connection:
        yield connection


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def until_not_serving(connection: grpc.aio.Channel) -> None:
    """Leaves its Watch open, as a load balancer would."""
    watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest(service=NAME))
    while (await watch.read()).status != NOT_SERVING:
        pass
    WATCHES.append(watch)


async def test_health_and_the_gate_open_only_once_the_service_has_started() -> None:
    service = EchoService()
    service.may_start.clear()
    server = Server(service, ServerSettings())
    async with connected(await server.bind()) as connection:
        start = asyncio.create_task(server.start())
        health = health_pb2_grpc.HealthStub(connection)
        for name in ("", NAME):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == NOT_SERVING
        assert await code_of(EchoStub(connection).echo(ask())) == grpc.StatusCode.UNAVAILABLE
        service.may_start.set()
        await start
        for name in ("", NAME):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
        await EchoStub(connection).echo(ask())
    await server.stop(drain_seconds=0)
    assert service.stopped


async def test_a_drain_lets_a_running_session_finish_and_refuses_a_new_one() -> None:
    service = EchoService()
    server = Server(service, ServerSettings())
    async with connected(await server.bind()) as connection:
        await server.start()
        session = EchoStub(connection).hold()
        await session.read()
        stop = asyncio.create_task(server.stop(drain_seconds=30))
        await until_not_serving(connection)
        refused = EchoStub(connection).hold()
        assert await code_of(refused.read()) == grpc.StatusCode.UNAVAILABLE
        assert "draining" in await refused.details()
        assert not stop.done()
        service.release.set()
        await session.read()
        assert await session.code() == grpc.StatusCode.OK
        async with asyncio.timeout(5):  # the open Watch must not hold the stop for the drain time
            await stop
        assert service.stopped


async def test_a_session_that_outlives_the_drain_time_is_cut_off() -> None:
    service = EchoService()
    server = Server(service, ServerSettings())
    async with connected(await server.bind()) as connection:
        await server.start()
        session = EchoStub(connection).hold()
        await session.read()
        async with asyncio.timeout(5):
            await server.stop(drain_seconds=0.05)
        assert await code_of(session.read()) in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


async def test_a_stream_that_the_client_cancels_is_closed_at_once() -> None:
    service = EchoService()
    async with running(service) as port, connected(port) as connection:
        session = EchoStub(connection).hold()
        await session.read()
        session.cancel()
        async with asyncio.timeout(5):
            await service.stream_closed.wait()


async def test_a_stream_that_the_client_does_not_read_is_closed_and_others_go_on() -> None:
    service = EchoService()
    settings = ServerSettings(write_seconds=0.5)
    async with running(service, settings) as port, connected(port) as connection:
        stalled = EchoStub(connection).flood()
        await stalled.read()
        with capture_logs() as lines:
            async with asyncio.timeout(20):
                await service.stream_closed.wait()
            assert [line["event"] for line in lines] == ["peer stalled"]
        assert (await EchoStub(connection).echo(ask())).status == SERVING
        assert await code_of(read_all(stalled)) is grpc.StatusCode.ABORTED
        assert await stalled.details() == "expected the messages of the stream to be read within 0.5 s"


async def test_a_port_in_use_refuses_the_start_and_names_the_address() -> None:
    async with running(EchoService()) as port:
        with pytest.raises(StartError, match=f"port: cannot listen on 127.0.0.1:{port}"):
            await Server(EchoService(), ServerSettings(port=port)).bind()


async def test_reflection_lists_the_service_and_health() -> None:
    async with running(EchoService()) as port, connected(port) as connection:
        stub = reflection_pb2_grpc.ServerReflectionStub(connection)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = {service.name for service in (await call.read()).list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= listed


async def test_a_message_over_the_limit_is_refused_and_the_service_goes_on() -> None:
    settings = ServerSettings(max_message_bytes=2**16)
    async with running(EchoService(), settings) as port, connected(port) as connection:
        stub = EchoStub(connection)
        assert await code_of(stub.echo(ask("x" * 2**17))) == grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.echo(ask())


async def test_waiting_for_a_server_that_never_serves_ends_with_its_address() -> None:
    service = EchoService()
    service.may_start.clear()
    server = Server(service, ServerSettings())
    port = await server.bind()
    with pytest.raises(TimeoutError, match=f"{NAME} at 127.0.0.1:{port}"):
        await wait_until_serving(f"127.0.0.1:{port}", NAME, timeout_seconds=0.3)
    await server.stop(drain_seconds=0)


class EchoProcess:
    """The echo service in a child process."""

    def __init__(self, *flags: str, log: Path) -> None:
        command = [sys.executable, "-m", "tests.serving.echo_service", "--port", "0", *flags]
        environment = {**os.environ, "EAGLE_PANGU_SUPERVISED": "1"}
        self.log = log
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment
        )

    def port(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline().rpartition(":")[2])

    def wait(self) -> int:
        return self.process.wait(timeout=20)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "end of stdin"])
async def test_a_process_told_to_stop_drains_its_sessions_first(how: str, tmp_path: Path) -> None:
    child = EchoProcess(log=tmp_path / "log")
    port = child.port()
    async with connected(port) as connection:
        await wait_until_serving(f"127.0.0.1:{port}", NAME)
        session = EchoStub(connection).hold()
        await session.read()
        if how == "end of stdin":
            assert child.process.stdin is not None
            child.process.stdin.close()
        else:
            child.process.send_signal(signal.Signals[how])
        await until_not_serving(connection)
        assert child.process.poll() is None
        await session.done_writing()
        await session.read()
        assert await session.code() == grpc.StatusCode.OK
    assert await asyncio.to_thread(child.wait) == 0
    assert [event["event"] for event in child.events()] == ["listening", "serving", "draining", "stopped"]


async def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    child = EchoProcess(log=tmp_path / "log")
    port = child.port()
    async with connected(port) as connection:
        await wait_until_serving(f"127.0.0.1:{port}", NAME)
        session = EchoStub(connection).hold()
        await session.read()
        child.process.send_signal(signal.SIGTERM)
        child.process.send_signal(signal.SIGINT)  # too soon to be meant as a second one
        await until_not_serving(connection)
        assert child.process.poll() is None
        while child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
        assert child.wait() == 0
    assert "drain cut short by a second signal" in [event["event"] for event in child.events()]


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--model", "refuse"], 1, "teacher.model: refused by the test"),
        (["--model", "crash"], 1, "crashed by the test"),
        (["--slots", "none"], 2, "teacher.slots: input should be a valid integer"),
    ],
)
def test_a_start_that_fails_ends_the_process_and_says_why(
    flags: list[str], status: int, said: str, tmp_path: Path
) -> None:
    child = EchoProcess(*flags, log=tmp_path / "log")
    assert child.wait() == status
    log = child.log.read_text()
    assert said in log
    assert ("Traceback" in log) == ("crash" in flags)


def test_serving_and_the_command_line_import_without_torch() -> None:
    modules = [f"eagle_pangu.serving.{path.stem}" for path in Path(serving.__path__[0]).glob("[a-z]*.py")]
    assert "eagle_pangu.serving.bootstrap" in modules
    code = f"import {', '.join(modules)}, eagle_pangu.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
