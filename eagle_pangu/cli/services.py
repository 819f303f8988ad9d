"""The flags that describe the three services, and launching them with their progress shown."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eagle_pangu.cli.console import notes
from eagle_pangu.serving.configuration import load_settings
from eagle_pangu.serving.settings import SERVICES, SectionName, Settings
from eagle_pangu.serving.trio import State, Trio, running_trio
from eagle_pangu.speculation.models import ModelError, resolve_model

Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16, of both models.")]
Mode = Annotated[str | None, typer.Option(help="reference or performance.")]
Numerics = Annotated[str | None, typer.Option(help="auto, bitwise or free.")]
Drafter = Annotated[
    str | None, typer.Option(help="Default drafter: ngram, standalone, eagle3, hybrid; none: teacher-only.")
]
TeacherThreads = Annotated[int | None, typer.Option(min=0, help="CPU threads of the teacher; 0: all cores.")]
DraftThreads = Annotated[int | None, typer.Option(min=0, help="CPU threads of the draft; 0: all cores.")]
TeacherModel = Annotated[str | None, typer.Option(help="Pulled model or transformers directory.")]
DraftModel = Annotated[str | None, typer.Option(help="The same, for the standalone drafter.")]
CheckIndices = Annotated[
    bool, typer.Option("--check-indices", help="Both models under the index guard: slow, for finding faults.")
]
LogDirectory = Annotated[Path | None, typer.Option(help="Keep the logs of the three processes here.")]

STEPS: dict[State, int] = {"launched": 0, "listening": 1, "serving": 2, "stopped": 2}


@dataclass(frozen=True)
class ServiceFlags:
    """What the flags say of the services; None: what file and environment say."""

    dtype: str | None = None
    mode: str | None = None
    numerics: str | None = None
    drafter: str | None = None
    teacher_threads: int | None = None
    draft_threads: int | None = None
    teacher_model: str | None = None
    draft_model: str | None = None
    port: int | None = None
    check_indices: bool = False

    def settings(self, argv: Sequence[str] = ()) -> Settings:
        """The configuration with these flags laid over `argv`, environment and file.

        Raises:
            SettingsError: a bad value anywhere.
            ModelError: a model is not here; names the setting, and the command that pulls it.
        """
        both = {"dtype": self.dtype, "check_indices": self.check_indices or None}
        numerics = {"mode": self.mode, "numerics": self.numerics}
        overrides = {
            "teacher": {**both, **numerics, "threads": self.teacher_threads, "model": self.teacher_model},
            "draft": {**both, "drafter": self.drafter, "threads": self.draft_threads, "model": self.draft_model},
            "orchestrator": {"drafter": self.drafter, "port": self.port},
        }
        settings = load_settings(
            argv, overrides={name: _given(values) for name, values in overrides.items()}, program="eagle-pangu up"
        )
        for name, model in (("teacher", settings.teacher.model), ("draft", settings.draft.model)):
            if model:
                _require_model(name, model)
        return settings


@contextlib.asynccontextmanager
async def launched(settings: Settings, log_directory: Path | None = None) -> AsyncIterator[Trio]:
    """`running_trio` with a line for each process on stderr while it starts and while it drains."""
    columns = (SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(bar_width=20), TimeElapsedColumn())
    async with contextlib.AsyncExitStack() as stack:
        progress = Progress(*columns, console=notes)
        tasks = {name: progress.add_task(f"{name}: waiting", total=STEPS["serving"], start=False) for name in SERVICES}

        def on_state(name: SectionName, state: State) -> None:
            if state == "launched":
                progress.start_task(tasks[name])
            text = "loading" if state == "listening" else state
            progress.update(tasks[name], description=f"{name}: {text}", completed=STEPS[state])

        with progress:
            trio = await stack.enter_async_context(
                running_trio(settings, log_directory=log_directory, on_state=on_state)
            )
        try:
            yield trio
        finally:
            notes.print("draining", style="dim")


def _require_model(section: str, model: str) -> None:
    try:
        resolve_model(model)
    except ModelError as error:
        raise ModelError(f"{section}.model: {error}") from None


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
