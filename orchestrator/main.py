"""The orchestrator as a process: channels, the teacher's model, the servicer. Its configuration is `orchestrator.*`."""

from __future__ import annotations

import asyncio

import grpc.aio

from eagle_pangu.serving.bootstrap import StartError, run_service
from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.settings import OrchestratorSettings
from orchestrator.drafters import Drafters
from orchestrator.drafting import DraftService
from orchestrator.generation import Services
from orchestrator.model import fetch_model
from orchestrator.service import GenerationServicer
from orchestrator.trace import TraceFile
from protos.v1 import draft_pb2_grpc, generation_pb2_grpc, teacher_pb2_grpc


class OrchestratorService:
    """The `Service` that the bootstrap runs. It starts once there is a teacher; a draft may come later.

    Args:
        settings: the orchestrator's section.
    """

    service_names = ("eagle_pangu.v1.GenerationService",)

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self._channels: list[grpc.aio.Channel] = []
        self._trace: TraceFile | None = None
        self._draining = asyncio.Event()
        self._servicer = GenerationServicer(self._load, settings.max_concurrent)

    def register(self, server: grpc.aio.Server) -> None:
        """See `Service.register`."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Wait for the teacher, and fetch its model and tokenizer."""
        settings = self._settings
        self._teacher = teacher_pb2_grpc.TeacherServiceStub(self._channel(settings.teacher))
        self._draft = draft_pb2_grpc.DraftServiceStub(self._channel(settings.draft)) if settings.draft else None
        if settings.trace is not None:
            try:
                self._trace = TraceFile(settings.trace, settings.trace_text)
            except OSError as error:
                raise StartError(f"trace: {error}") from error
        await self._servicer.load()

    def hindrance(self) -> str | None:
        """None: it has no work but that of the event loop, which answers health itself."""
        return None

    async def drained(self) -> None:
        """Let no request wait for a lost teacher any longer; return once none is served."""
        self._draining.set()
        await self._servicer.idle()

    async def stop(self) -> None:
        """Close the channels and the trace."""
        for each in self._channels:
            await each.close()
        if self._trace is not None:
            self._trace.close()

    async def _load(self) -> Services:
        settings = self._settings
        model = await fetch_model(self._teacher)
        drafting = None
        if self._draft is not None:
            drafting = DraftService(
                self._draft,
                model.fingerprint,
                deadline_seconds=settings.draft_deadline_seconds,
                rest_seconds=settings.draft_retry_seconds,
            )
        return Services(
            model=model,
            limits=model.limits(settings),
            drafters=Drafters(self._draft, settings.drafter),
            teacher=self._teacher,
            draft=drafting,
            trace=self._trace,
            answer_seconds=settings.teacher_deadline_seconds,
            draining=self._draining,
        )

    def _channel(self, target: str) -> grpc.aio.Channel:
        opened = channel(target, self._settings)
        self._channels.append(opened)
        return opened


def main() -> None:
    """Entry point of the container and of `eagle-pangu up`."""
    run_service("eagle-pangu-orchestrator", lambda settings: OrchestratorService(settings.orchestrator), "orchestrator")


if __name__ == "__main__":
    main()
