"""What the options of a channel are there for."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eagle_pangu.serving import channels
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.settings import ServerSettings
from tests.serving.echo_service import EchoService


class Relay:
    """Between a client and a server; while `open` is clear it keeps connections and passes nothing on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.open = asyncio.Event()
        self.open.set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer_reader, peer_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass(reader, peer_writer), self._pass(peer_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                await self.open.wait()
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()


async def test_a_connection_on_which_nothing_is_answered_is_given_up_after_a_ping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "PING_TIMEOUT_MS", 300)
    settings = ServerSettings(keepalive_seconds=0.3)
    async with running(EchoService()) as port:
        relay = Relay(port)
        server = await asyncio.start_server(relay.connected, "127.0.0.1", 0)
        async with channels.channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", settings) as connection:
            stub = health_pb2_grpc.HealthStub(connection)
            await stub.Check(health_pb2.HealthCheckRequest())
            relay.open.clear()
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        relay.open.set()
        server.close()
