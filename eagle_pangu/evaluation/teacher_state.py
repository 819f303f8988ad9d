"""What a teacher tells of itself while it is measured: its passes since the start, and what is free of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc.aio

from eagle_pangu.evaluation.asking import AskError
from protos.v1 import teacher_pb2, teacher_pb2_grpc

ANSWER_SECONDS = 60.0
POLL_SECONDS = 0.2


class Passes(NamedTuple):
    """Forward passes; the fields of BatchStats in teacher.proto. Sums, of a phase or since the teacher's start.

    longest_wait_us: always since the teacher's start.
    """

    passes: int
    sessions: int
    rows: int
    computed_rows: int
    pass_us: int
    realign_us: int
    longest_wait_us: int

    def since(self, before: Passes) -> Passes:
        """Those that came after `before`."""
        return Passes(
            self.passes - before.passes,
            self.sessions - before.sessions,
            self.rows - before.rows,
            self.computed_rows - before.computed_rows,
            self.pass_us - before.pass_us,
            self.realign_us - before.realign_us,
            self.longest_wait_us,
        )


class Free(NamedTuple):
    """What no session holds: slots, and tokens of KV."""

    slots: int
    kv_tokens: int


@dataclass(frozen=True)
class TeacherState:
    """At one moment. batching: how sessions share a pass, by name. whole: what is free when there is no session."""

    batching: str
    passes: Passes
    free: Free
    whole: Free


class TeacherWatch:
    """Asks one teacher how it is."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = teacher_pb2_grpc.TeacherServiceStub(channel)

    async def state(self) -> TeacherState:
        """Now.

        Raises:
            AskError: no answer within ANSWER_SECONDS.
        """
        try:
            told = await self._stub.GetModel(teacher_pb2.GetModelRequest(), wait_for_ready=True, timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise AskError(f"teacher: {error.code().name}: {error.details()}") from error
        passes = Passes(**{name: getattr(told.batches, name) for name in Passes._fields})
        free, whole = Free(told.free_slots, told.free_kv_tokens), Free(told.slots, told.kv_tokens)
        return TeacherState(told.batches.batching, passes, free, whole)

    async def settled(self, seconds: float) -> TeacherState:
        """The state once the last session is gone, or after so many seconds as it then is."""
        deadline = time.monotonic() + seconds
        while True:
            state = await self.state()
            if state.free == state.whole or time.monotonic() >= deadline:
                return state
            await asyncio.sleep(POLL_SECONDS)


def resident_mib(pid: int) -> float | None:
    """Memory that a process holds in RAM; None where the system has no /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmRSS:")), None)
    return None if line is None else int(line.split()[1]) / 1024
