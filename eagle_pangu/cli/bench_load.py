"""The load runs of `eagle-pangu bench`: one load, or an endurance run; progress and a table out."""

from __future__ import annotations

from typing import NoReturn

import typer

from eagle_pangu.cli import console
from eagle_pangu.cli.console import answers, notes
from eagle_pangu.cli.measuring import NOT_EXACT, report, shown
from eagle_pangu.evaluation.load_run import LoadSettings, run_load
from eagle_pangu.evaluation.load_summary import LoadSummary
from eagle_pangu.evaluation.soak import SoakSummary
from eagle_pangu.evaluation.soak_run import SoakSettings, run_soak
from eagle_pangu.evaluation.tables import load_table, soak_table


def bench_load(settings: LoadSettings) -> NoReturn:
    """Measure one load, or an endurance run; ends the command with its status.

    Raises:
        typer.Exit: always.
    """
    if isinstance(settings, SoakSettings):
        soak = console.run(_soak(settings))
        answers.print(soak_table(soak))
        summary, failures = soak.load, soak.failures
    else:
        summary = console.run(_load(settings))
        answers.print(load_table(summary))
        failures = summary.failures
    report(summary, summary.requests, failures)
    notes.print(f"written to {settings.output}", markup=False)
    raise typer.Exit(NOT_EXACT if failures else 0)


async def _load(settings: LoadSettings) -> LoadSummary:
    requests = len(settings.items())
    with shown(requests if settings.reference else 2 * requests) as progress:
        return await run_load(
            settings, on_state=progress.state, on_reference=progress.reference, on_record=progress.record
        )


async def _soak(settings: SoakSettings) -> SoakSummary:
    with shown(None) as progress:
        return await run_soak(
            settings, on_state=progress.state, on_reference=progress.reference, on_record=progress.record
        )
