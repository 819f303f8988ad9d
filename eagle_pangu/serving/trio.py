"""The three services as processes of this machine, started and drained together.

Used by `up`, `demo`, `bench` and the end-to-end tests. It knows nothing of what they serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from eagle_pangu.serving.ports import require_free_ports
from eagle_pangu.serving.processes import ProcessDiedError, ServiceProcess
from eagle_pangu.serving.settings import DraftSettings, SectionName, ServerSettings, Settings, TeacherSettings

State = Literal["launched", "listening", "serving", "stopped"]
OnState = Callable[[SectionName, State], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Trio:
    """Three running services."""

    teacher: ServiceProcess
    draft: ServiceProcess
    orchestrator: ServiceProcess

    @property
    def target(self) -> str:
        """Where Generate is served, as HOST:PORT."""
        return self.orchestrator.target

    async def died(self) -> NoReturn:
        """Wait for the teacher or the orchestrator to end, and raise ProcessDiedError. A draft can be done without."""
        await self.teacher.unless_died(self.orchestrator.died())

    async def unless_died(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` to its end; cancel it and raise ProcessDiedError if `died` would."""
        return await self.teacher.unless_died(self.orchestrator.unless_died(work))


def _ignore_state(_name: SectionName, _state: State) -> None: ...


@contextlib.asynccontextmanager
async def running_trio(
    settings: Settings, *, log_directory: Path | None = None, on_state: OnState = _ignore_state
) -> AsyncIterator[Trio]:
    """All three services, serving; drained and stopped on leaving, whatever the reason.

    The orchestrator listens on `settings.orchestrator.port`; the teacher and the draft on theirs, or on ports of the
    system's choice where the settings leave the default.

    Args:
        settings: Their configuration; the orchestrator's targets are filled in.
        log_directory: Logs (`teacher.log`, ...) and effective configurations; None: a temporary folder.
        on_state: Told of every step.

    Raises:
        SettingsError: a port is in use; nothing was launched.
        ProcessDiedError: one ended during the start; carries the end of its log.
        TimeoutError: one was not serving in time.
    """
    defaults: dict[SectionName, ServerSettings] = {"teacher": TeacherSettings(), "draft": DraftSettings()}
    for name, default in defaults.items():
        if getattr(settings, name).port == default.port:
            settings = _with_section(settings, name, port=0)
    require_free_ports(settings)
    async with contextlib.AsyncExitStack() as stack:
        if log_directory is None:
            log_directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eagle-pangu-")))
        log_directory.mkdir(parents=True, exist_ok=True)

        async def launch(name: SectionName, settings: Settings) -> ServiceProcess:
            process = await ServiceProcess.launch(name, settings, log_directory)
            stack.push_async_callback(_stop, process, on_state)
            on_state(name, "launched")
            return process

        async def listen(process: ServiceProcess) -> None:
            await process.listening()
            on_state(process.name, "listening")

        async def serve(process: ServiceProcess) -> None:
            await process.serving()
            on_state(process.name, "serving")

        teacher, draft = await launch("teacher", settings), await launch("draft", settings)
        await _all(listen(teacher), listen(draft))
        settings = _with_section(settings, "orchestrator", teacher=teacher.target, draft=draft.target)
        orchestrator = await launch("orchestrator", settings)
        await listen(orchestrator)
        await _all(serve(teacher), serve(draft), serve(orchestrator))
        # Left in reverse order: the orchestrator drains first, while it still has its models.
        yield Trio(teacher, draft, orchestrator)


async def _stop(process: ServiceProcess, on_state: OnState) -> None:
    with contextlib.suppress(TimeoutError):
        await process.stop()
    on_state(process.name, "stopped")


async def _all(*work: Coroutine[Any, Any, None]) -> None:
    """Run together; the first failure cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except* (ProcessDiedError, TimeoutError) as failures:
        raise failures.exceptions[0] from None


def _with_section(settings: Settings, name: SectionName, **values: Any) -> Settings:
    return settings.model_copy(update={name: getattr(settings, name).model_copy(update=values)})
