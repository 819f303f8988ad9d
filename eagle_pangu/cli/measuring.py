"""What the measuring commands share: their exit statuses, a progress bar, and how they say what did not hold.

Exit status: 0 when everything held, 1 when ids differ where they must not, 2 when the run could not be made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagle_pangu.cli import console
from eagle_pangu.cli.console import notes
from eagle_pangu.evaluation.asking import AskError
from eagle_pangu.evaluation.batch_table import ResultsError
from eagle_pangu.evaluation.load import LoadRecord
from eagle_pangu.evaluation.load_summary import LoadSummary
from eagle_pangu.evaluation.prompts import PromptFileError
from eagle_pangu.evaluation.records import Answer
from eagle_pangu.evaluation.references import ReferenceMismatchError
from eagle_pangu.evaluation.summary import Summary
from eagle_pangu.evaluation.trace_file import TraceError
from eagle_pangu.serving.settings import SectionName
from eagle_pangu.serving.trio import State

Batching = Annotated[
    str | None, typer.Option(help="How sessions share the teacher's passes: ragged, eqspec or exspec.")
]

NOT_EXACT, NO_RUN = 1, 2

NOT_MADE = (
    *(*console.EXPECTED, OSError),
    *(AskError, PromptFileError, ReferenceMismatchError, ResultsError, TraceError),
)


def no_run(error: object) -> NoReturn:
    """Say why the run could not be made and end with its status."""
    notes.print(f"error: {error or type(error).__name__}", style="red", markup=False)
    raise typer.Exit(NO_RUN)


class Shown:
    """A run on a progress bar, a step an answer."""

    def __init__(self, progress: Progress, steps: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task("waiting for the services", total=steps)
        self._exact = self._compared = 0

    def state(self, name: SectionName, state: State) -> None:
        """A service has come so far."""
        self._progress.update(self._task, description=f"{name} {state}")

    def reference(self, item_id: str, answer: Answer) -> None:
        """A reference answer is there."""
        self.step(f"reference {item_id}")

    def record(self, record: LoadRecord) -> None:
        """An answer under load is there."""
        self._compared += 1
        self._exact += bool(record.turn.exact)
        self.step(f"{self._exact}/{self._compared} exact")

    def step(self, text: str) -> None:
        """One more."""
        self._progress.update(self._task, advance=1, description=text)


@contextmanager
def shown(steps: int | None) -> Iterator[Shown]:
    """A progress bar while the block runs; an error that means that the run could not be made ends the command.

    Args:
        steps: answers of the whole run; None: nobody knows.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=notes) as progress:
        try:
            yield Shown(progress, steps)
        except NOT_MADE as error:
            no_run(error)


def report(summary: Summary | LoadSummary, answers: int, failures: Sequence[str]) -> None:
    """What a reader must not miss under the table.

    Args:
        summary: the figures shown there.
        answers: of the run.
        failures: what did not hold.
    """
    for failure in failures:
        notes.print(f"failed: {failure}", style="red", markup=False)
    ties = sum(divergence.near_tie for divergence in summary.first_divergences)
    if ties:
        notes.print(f"{ties} of {answers} turns leave teacher-only at a near-tie; summary.json lists them")
    if summary.fallback_rounds:
        reasons = ", ".join(summary.fallback_reasons)
        rounds = f"{summary.fallback_rounds} of {summary.rounds} rounds"
        notes.print(f"{rounds} had no draft: {reasons}", style="yellow", markup=False)
    numerics = summary.numerics
    for name, reason in (("numerics", numerics.degraded_reason), ("attention", numerics.attention_fallback_reason)):
        if reason:
            notes.print(f"{name}: {reason}", style="yellow", markup=False)
