"""A stack of scripted services around a real orchestrator, all in this process, on ports of the loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.settings import OrchestratorSettings
from orchestrator.main import OrchestratorService
from protos.v1 import draft_pb2_grpc, generation_pb2, generation_pb2_grpc, teacher_pb2_grpc
from tests.orchestrator.scripted import Plan, ScriptedDraft, ScriptedTeacher, knowing


async def serve(add: Any, servicer: Any, port: int = 0) -> tuple[grpc.aio.Server, int]:
    """A bare gRPC server with one servicer."""
    server = grpc.aio.server()
    add(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


def options(**fields: Any) -> generation_pb2.GenerationOptions:
    """Options of the usual prompt."""
    if not {"prompt", "prompt_token_ids", "chat"} & fields.keys():
        fields["prompt"] = "prompt"
    return generation_pb2.GenerationOptions(**fields)


@dataclass
class Stack:
    """What a test holds in its hands."""

    teacher: ScriptedTeacher
    draft: ScriptedDraft
    stub: Any
    target: str
    teacher_server: grpc.aio.Server
    teacher_port: int
    draft_server: grpc.aio.Server | None
    draft_port: int
    service: OrchestratorService

    async def generate(self, **fields: Any) -> generation_pb2.GenerateResponse:
        """The unary answer."""
        request = generation_pb2.GenerateRequest(options=options(**fields))
        response: generation_pb2.GenerateResponse = await self.stub.Generate(request, timeout=20)
        self.no_faults()
        return response

    async def stream(self, **fields: Any) -> list[generation_pb2.GenerateStreamResponse]:
        """All messages of a stream."""
        request = generation_pb2.GenerateStreamRequest(options=options(**fields))
        messages = [message async for message in self.stub.GenerateStream(request, timeout=20)]
        self.no_faults()
        return messages

    async def idle(self) -> None:
        """Return once both peers have no session."""
        async with asyncio.timeout(5):
            await self.teacher.idle.wait()
            await self.draft.idle.wait()

    def no_faults(self) -> None:
        """Both peers were spoken to as the contract says."""
        assert self.teacher.faults == []
        assert self.draft.faults == []


@contextlib.asynccontextmanager
async def stack(
    teacher: ScriptedTeacher | None = None,
    plan: Plan | None = None,
    *,
    with_draft: bool = True,
    needs_features: bool = False,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Scripted services around an orchestrator with these settings; without a draft its port is dead."""
    teacher = teacher or ScriptedTeacher()
    draft = ScriptedDraft(plan or knowing(teacher.next_token, lambda number: number % 4), teacher)
    draft.needs_features = needs_features
    teacher_server, teacher_port = await serve(teacher_pb2_grpc.add_TeacherServiceServicer_to_server, teacher)
    draft_server, draft_port = await serve(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft)
    if not with_draft:
        await draft_server.stop(None)
    service = OrchestratorService(
        OrchestratorSettings(
            **{
                "teacher": f"127.0.0.1:{teacher_port}",
                "draft": f"127.0.0.1:{draft_port}",
                "draft_retry_seconds": 0,
                "draft_deadline_seconds": 5,
                "teacher_deadline_seconds": 10,
                **settings,
            }
        )
    )
    async with running(service) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        target = f"127.0.0.1:{port}"
        yield Stack(teacher, draft, stub, target, teacher_server, teacher_port, draft_server, draft_port, service)
    await teacher_server.stop(None)
    await draft_server.stop(None)


@pytest.fixture
async def usual() -> AsyncIterator[Stack]:
    """A draft with 0, 1, 2, 3 right tokens in turn."""
    async with stack() as each:
        yield each
