"""A forward pass that hangs shows in health, though the process and its event loop are well."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eagle_pangu.serving import bootstrap
from eagle_pangu.speculation.tree import TokenTree
from tests.teacher_service.fakes import FakeEngine, Gate, answer
from tests.teacher_service.peer import serving

PROMPT = [11, 5, 80]


async def test_health_follows_the_heartbeat_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "HEALTH_SECONDS", 0.01)
    engine = FakeEngine()
    gate = Gate(engine, "verify")
    async with serving(engine, stall_seconds=0.05) as served:
        request = health_pb2.HealthCheckRequest(service="eagle_pangu.v1.TeacherService")
        watch = health_pb2_grpc.HealthStub(served.connection).Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        session = served.session()
        await session.open(PROMPT)
        await session.send_verify(1, len(PROMPT), 0, TokenTree.root_only(answer(PROMPT, 1)[0]))
        await gate.reached()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        gate.let()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await session.read()).HasField("verdict")
        watch.cancel()
