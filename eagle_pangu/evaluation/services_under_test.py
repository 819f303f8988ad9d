"""The services that a run asks: launched for it, or an orchestrator of the caller's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eagle_pangu.evaluation.asking import Asker, RequestLimits
from eagle_pangu.evaluation.teacher_state import TeacherWatch
from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.settings import ServerSettings, Settings
from eagle_pangu.serving.trio import OnState, Trio, running_trio
from eagle_pangu.speculation.models import resolve_model

T = TypeVar("T")

LOG_DIRECTORY = "logs"


@dataclass(frozen=True)
class ServicesUnderTest:
    """target: of the orchestrator, HOST:PORT. trio: the processes; None where the caller named a server."""

    target: str
    trio: Trio | None = None

    @asynccontextmanager
    async def connected(self, limits: RequestLimits) -> AsyncIterator[tuple[Asker, TeacherWatch | None]]:
        """Someone to ask, and someone who watches the teacher where its address is known, while the block runs."""
        async with channel(self.target, ServerSettings()) as orchestrator:
            asker = Asker(orchestrator, limits)
            if self.trio is None:
                yield asker, None
                return
            async with channel(self.trio.teacher.target, ServerSettings()) as teacher:
                yield asker, TeacherWatch(teacher)


async def on_services(
    services: Settings,
    server: str | None,
    output: Path,
    work: Callable[[ServicesUnderTest], Coroutine[Any, Any, T]],
    on_state: OnState,
) -> T:
    """Do the work with the services running.

    Args:
        services: their configuration.
        server: HOST:PORT of a running orchestrator; None: launch all three.
        output: folder of the logs.
        work: what to do.
        on_state: told of every step of the processes; not called with a server of the caller's.

    Raises:
        ModelError, ProcessDiedError, TimeoutError, SettingsError: the services could not be launched, or died.
    """
    if server is not None:
        return await work(ServicesUnderTest(server))
    for model in filter(None, (services.teacher.model, services.draft.model)):
        resolve_model(model)  # before a process dies of it
    async with running_trio(services, log_directory=output / LOG_DIRECTORY, on_state=on_state) as trio:
        return await trio.unless_died(work(ServicesUnderTest(trio.target, trio)))
