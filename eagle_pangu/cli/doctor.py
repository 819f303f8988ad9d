"""`eagle-pangu doctor`: what this machine can serve with, as lines or as JSON; status 1 where something failed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from eagle_pangu.cli.console import answers, notes
from eagle_pangu.doctor.examination import examine
from eagle_pangu.doctor.results import Result
from eagle_pangu.serving.settings import Device, TeacherSettings

_COLOURS = {"ok": "green", "failed": "red", "not checked": "yellow"}


def doctor(
    device: Annotated[
        Device | None, typer.Option(help="Only this one, which must be there. Default: those that are, and npu.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Pulled model or transformers directory; its sizes decide which kernels are tried.")
    ] = TeacherSettings().model,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check versions, devices and kernels, and say what could not be checked."""
    results = []
    for result in examine((device,) if device else (), model):
        results.append(result)
        if not as_json:
            _show(result)
    failed = [result.name for result in results if result.status == "failed"]
    if as_json:
        answers.print_json(json.dumps({"failed": failed, "results": [result._asdict() for result in results]}))
    elif failed:
        notes.print(f"failed: {', '.join(failed)}", style="red", markup=False)
    raise typer.Exit(bool(failed))


def _show(result: Result) -> None:
    answers.print(f"{result.status:<11}  ", style=_COLOURS[result.status], end="", markup=False)
    answers.print(f"{result.name}: {result.text}", markup=False)
