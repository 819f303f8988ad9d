"""The scripted teacher as a process that is killed in the middle of an answer, as by the kernel for its memory."""

from __future__ import annotations

import os
import signal
from typing import Any

import grpc.aio

from eagle_pangu.serving.bootstrap import run_service
from protos.v1 import teacher_pb2_grpc
from tests.orchestrator.scripted import ScriptedTeacher

ROUNDS = 3


class DyingTeacher:
    """What the bootstrap runs."""

    service_names = ("eagle_pangu.v1.TeacherService",)

    def register(self, server: grpc.aio.Server) -> None:
        teacher = ScriptedTeacher()
        teacher.on_verify = self._die_later
        teacher_pb2_grpc.add_TeacherServiceServicer_to_server(teacher, server)

    async def start(self) -> None: ...

    def hindrance(self) -> str | None:
        return None

    async def drained(self) -> None: ...

    async def stop(self) -> None: ...

    async def _die_later(self, record: Any, _context: Any) -> None:
        if len(record.rounds) > ROUNDS:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run_service("dying-teacher", lambda _: DyingTeacher(), "teacher")
