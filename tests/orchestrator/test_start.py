"""The orchestrator starts once there is a teacher whose parts fit together, and needs no torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from eagle_pangu.serving.bootstrap import StartError, running
from eagle_pangu.serving.settings import OrchestratorSettings
from orchestrator.main import OrchestratorService
from protos.v1 import teacher_pb2, teacher_pb2_grpc
from tests.orchestrator.conftest import serve
from tests.orchestrator.scripted import TOKENIZER, ScriptedTeacher

MODULES = [
    "orchestrator.main",
    "eagle_pangu.client.client",
]


def test_orchestrator_and_client_import_without_torch() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
        f"import {', '.join(MODULES)}\n"
        "assert not [name for name in sys.modules if name.startswith(('torch.', 'transformers.'))]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def service(port: int, **settings: Any) -> OrchestratorService:
    return OrchestratorService(OrchestratorSettings(teacher=f"127.0.0.1:{port}", **settings))


async def test_it_waits_for_a_teacher_that_starts_later() -> None:
    add = teacher_pb2_grpc.add_TeacherServiceServicer_to_server
    server, port = await serve(add, ScriptedTeacher())
    await server.stop(None)
    starting = service(port)
    start = asyncio.create_task(starting.start())
    server, _ = await serve(add, ScriptedTeacher(), port)
    async with asyncio.timeout(15):
        await start
    await starting.stop()
    await server.stop(None)


async def refusal_of(teacher: ScriptedTeacher, **settings: Any) -> str:
    server, port = await serve(teacher_pb2_grpc.add_TeacherServiceServicer_to_server, teacher)
    try:
        with pytest.raises(StartError) as error:
            async with running(service(port, **settings)):
                pass
        return str(error.value)
    finally:
        await server.stop(None)


async def test_a_tokenizer_that_is_not_the_models_is_refused() -> None:
    class Mixed(ScriptedTeacher):
        async def GetTokenizer(self, request, context):  # noqa: N802
            changed = TOKENIZER.to_str().replace("<|im_start|>", "<|im_begin|>").encode()
            return teacher_pb2.GetTokenizerResponse(tokenizer_json=changed)

    assert "hash" in await refusal_of(Mixed())


async def test_what_is_no_tokenizer_is_refused() -> None:
    class Broken(ScriptedTeacher):
        async def GetTokenizer(self, request, context):  # noqa: N802
            return teacher_pb2.GetTokenizerResponse(tokenizer_json=b"{")

    assert "tokenizer" in await refusal_of(Broken())


async def test_what_is_no_teacher_is_refused() -> None:
    class Other(ScriptedTeacher):
        async def GetModel(self, request, context):  # noqa: N802
            raise NotImplementedError

    assert "teacher" in await refusal_of(Other())


async def test_slots_without_room_beside_a_tree_are_refused() -> None:
    teacher = ScriptedTeacher()
    teacher.slot_capacity = teacher.max_budget.rows + 1
    assert "room" in await refusal_of(teacher)


async def test_a_trace_that_cannot_be_opened_is_refused(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    assert "trace" in await refusal_of(ScriptedTeacher(), trace=tmp_path / "file" / "trace.jsonl")
