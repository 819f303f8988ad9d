"""Health follows the work: a service that says what hinders it is not SERVING until the hindrance has passed."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eagle_pangu.serving import bootstrap
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.stalls import stall
from tests.serving.echo_service import NAME, EchoService


class HinderedService(EchoService):
    reason: str | None = None

    def hindrance(self) -> str | None:
        return self.reason


async def test_health_is_that_of_the_work_and_comes_back_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "HEALTH_SECONDS", 0.01)
    service = HinderedService()
    async with running(service) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        async with asyncio.timeout(20):
            for reason, status in ((None, "SERVING"), ("the model hangs", "NOT_SERVING"), (None, "SERVING")):
                service.reason = reason
                answer = await watch.read()
                assert answer.status == health_pb2.HealthCheckResponse.ServingStatus.Value(status)
        watch.cancel()


def test_work_is_a_stall_once_it_takes_longer_than_it_may() -> None:
    assert stall(None, 1) is None
    assert stall(time.monotonic() - 0.5, 60) is None
    said = stall(time.monotonic() - 61, 60)
    assert said is not None
    assert "61" in said
