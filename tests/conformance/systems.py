"""Whole systems in this process, over loopback sockets: the real teacher and orchestrator, and a draft of choice."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from draft_service.main import DraftService
from eagle_pangu.client.client import GenerationClient
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.settings import DraftSettings, OrchestratorSettings, ServerSettings, TeacherSettings
from eagle_pangu.speculation.engine import Engine
from orchestrator.main import OrchestratorService
from protos.v1 import draft_pb2_grpc, generation_pb2, teacher_pb2, teacher_pb2_grpc, tree_pb2
from teacher_service.main import TeacherService, build_engine
from tests.models import VOCAB_SIZE, byte_tokenizer
from tests.orchestrator.conftest import serve
from tests.orchestrator.scripted import Plan, ScriptedDraft, knowing

SECONDS = 60
"""Of any one call: what hangs fails then."""

PROMPT = [72, 101, 108, 108, 111, 44, 32]
LETTERS = [byte_tokenizer().token_to_id(letter) for letter in string.ascii_lowercase]
"""One id a letter. With these alone allowed, a random model writes text, of one character a token."""


def teacher_settings(model: Path, **changes: Any) -> TeacherSettings:
    """Of a tiny model: one thread, chunks so small that every prompt takes some."""
    defaults: dict[str, Any] = {"dtype": "float32", "threads": 1, "slots": 8, "queue_limit": 1024}
    defaults |= {"slot_capacity": 320, "prefill_chunk": 16}
    return TeacherSettings(model=str(model), **{**defaults, "max_rows": 16, "max_depth": 8, **changes})


def draft_settings(model: Path, **changes: Any) -> DraftSettings:
    """Of a tiny draft model."""
    defaults: dict[str, Any] = {"model": str(model), "dtype": "float32", "threads": 1, "quantize": False}
    return DraftSettings(
        **{**defaults, "branching": 2, "max_rows": 16, "max_depth": 8, "slot_capacity": 320, **changes}
    )


def tiny_engine(model: Path, **changes: Any) -> Engine:
    """The teacher's own, built once and served by as many systems as there are."""
    return build_engine(teacher_settings(model, **{"slot_capacity": 512, "max_rows": 64, **changes}))


class Known:
    """One answer of the teacher, known beforehand: what scripts draft from, and what holds them to the contract.

    It stands where a `ScriptedDraft` expects a scripted teacher.
    """

    def __init__(self) -> None:
        self._sequence: list[int] = []

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The next request is this prompt, and this its answer."""
        self._sequence = [*prompt, *answer]

    def next_token(self, history: Sequence[int]) -> int:
        """What follows on the answer; any id after a history that left it."""
        length = len(history)
        on_it = length < len(self._sequence) and self._sequence[:length] == list(history)
        return self._sequence[length] if on_it else VOCAB_SIZE - 1

    def chain(self, *right: int) -> Plan:
        """As deep as the budget; so many right tokens, then wrong ones; in turn where there are several numbers."""
        return knowing(self.next_token, lambda number: right[number % len(right)])


def options(prompt: str | Sequence[int] = PROMPT, budget: tuple[int, int] | None = None, **fields: Any) -> Any:
    """A request; budget: rows and depth."""
    if isinstance(prompt, str):
        fields["prompt"] = prompt
    else:
        fields["prompt_token_ids"] = generation_pb2.TokenIds(ids=prompt)
    if budget is not None:
        fields["budget"] = tree_pb2.TreeBudget(rows=budget[0], depth=budget[1])
    return generation_pb2.GenerationOptions(**fields)


def changed(asked: generation_pb2.GenerationOptions, **fields: Any) -> generation_pb2.GenerationOptions:
    """A copy with other values of some scalar fields."""
    copy = generation_pb2.GenerationOptions()
    copy.CopyFrom(asked)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


@dataclass
class System:
    """What a test holds in its hands. draft: the scripted one, where there is one."""

    teacher: TeacherService
    client: GenerationClient
    target: str
    teacher_stub: Any
    draft: ScriptedDraft | None

    @property
    def scripted(self) -> ScriptedDraft:
        """The scripted draft."""
        assert self.draft is not None
        return self.draft

    def knows(self, prompt: Sequence[int], answer: Sequence[int], *right: int) -> Known:
        """Let the scripted draft propose chains of an answer, with so many right tokens in turn."""
        known: Known = self.scripted.teacher
        known.learn(prompt, answer)
        self.scripted.plan = known.chain(*right)
        self.scripted.asked.clear()
        self.scripted.faults.clear()
        return known

    async def ask(self, prompt: str | Sequence[int] = PROMPT, **fields: Any) -> generation_pb2.GenerateResponse:
        """The whole answer to `options`."""
        return await self.client.generate(options(prompt, **fields), seconds=SECONDS)

    async def send(self, asked: generation_pb2.GenerationOptions, **fields: Any) -> generation_pb2.GenerateResponse:
        """The whole answer to a request, some scalar fields of it changed."""
        return await self.client.generate(changed(asked, **fields), seconds=SECONDS)

    async def stream(
        self, prompt: str | Sequence[int] = PROMPT, **fields: Any
    ) -> list[generation_pb2.GenerateStreamResponse]:
        """All messages of a stream."""
        deltas = self.client.generate_stream(options(prompt, **fields), seconds=SECONDS)
        return [delta async for delta in deltas]

    async def model(self) -> teacher_pb2.GetModelResponse:
        """What the teacher says of itself."""
        return await self.teacher_stub.GetModel(teacher_pb2.GetModelRequest(), timeout=SECONDS)

    async def all_slots_free(self) -> None:
        """Return once every session at the teacher is over; fails when one never is."""
        async with asyncio.timeout(SECONDS):
            await self.teacher.slots.idle()
        model = await self.model()
        assert model.free_slots == model.slots


@asynccontextmanager
async def system(
    engine: Engine,
    draft: DraftSettings | ScriptedDraft | None,
    teacher: TeacherSettings,
    **orchestrator: Any,
) -> AsyncIterator[System]:
    """The services around an engine.

    Args:
        engine: of the teacher.
        draft: settings of the real draft service, a scripted one, or none at all.
        teacher: settings; model and numerics are the engine's, whatever they say.
        orchestrator: settings.
    """
    async with AsyncExitStack() as stack:
        service = TeacherService(teacher, lambda _settings: engine)
        teacher_target = f"127.0.0.1:{await stack.enter_async_context(running(service, teacher))}"
        draft_target = ""
        if isinstance(draft, ScriptedDraft):
            server, port = await serve(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft)
            stack.push_async_callback(server.stop, None)
            draft_target = f"127.0.0.1:{port}"
        elif draft is not None:
            draft_target = f"127.0.0.1:{await stack.enter_async_context(running(DraftService(draft), draft))}"
        defaults = {"draft_deadline_seconds": 30.0, "draft_retry_seconds": 0.0, "teacher_deadline_seconds": 30.0}
        settings = OrchestratorSettings(
            teacher=teacher_target, draft=draft_target, **{**defaults, "max_concurrent": 256, **orchestrator}
        )
        port = await stack.enter_async_context(running(OrchestratorService(settings), settings))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(teacher_target))
        client = await stack.enter_async_context(GenerationClient(f"127.0.0.1:{port}", ServerSettings()))
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)
        yield System(service, client, f"127.0.0.1:{port}", stub, draft if isinstance(draft, ScriptedDraft) else None)
