"""Waiting for another service's gRPC health. The server's side of health is in `bootstrap`."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.settings import ServerSettings

POLL_SECONDS = 0.1
CHECK_SECONDS = 2.0


async def is_serving(connection: grpc.aio.Channel, service: str = "", timeout_seconds: float = CHECK_SECONDS) -> bool:
    """One health check; False also when nobody answers within `timeout_seconds`."""
    try:
        stub = health_pb2_grpc.HealthStub(connection)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def wait_until_serving(
    target: str, service: str = "", timeout_seconds: float = 60.0, settings: ServerSettings | None = None
) -> None:
    """Return once `service` at `target` is SERVING; "" is the server as a whole.

    Raises:
        TimeoutError: it was not within `timeout_seconds`.
    """
    connection = channel(target, settings or ServerSettings())
    try:
        async with asyncio.timeout(timeout_seconds):
            while not await is_serving(connection, service):  # noqa: ASYNC110 - the other side is a process
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TimeoutError(
            f"{service or 'the server'} at {target} was not serving within {timeout_seconds:g} s"
        ) from None
    finally:
        await connection.close()
