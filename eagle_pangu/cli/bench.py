"""`eagle-pangu bench`: flags in; progress, a table, and the run's files out.

Exit status: 0 when everything held, 1 when ids differ where they must not, 2 when the run could not be made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagle_pangu.cli import console, services
from eagle_pangu.cli.console import answers, notes
from eagle_pangu.evaluation.asking import AskError
from eagle_pangu.evaluation.records import TurnRecord
from eagle_pangu.evaluation.run import RunSettings, run
from eagle_pangu.evaluation.sharding import Shard
from eagle_pangu.evaluation.summary import Summary
from eagle_pangu.evaluation.tables import summary_table
from eagle_pangu.evaluation.trace_file import TraceError
from eagle_pangu.serving.settings import SectionName
from eagle_pangu.serving.trio import State

NOT_EXACT, NO_RUN = 1, 2


def bench(
    output: Annotated[Path, typer.Option(help="Folder for turns.jsonl, summary.json, trace.jsonl and logs.")],
    prompts: Annotated[Path | None, typer.Option(help="Prompt file; default: the set of this project.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items, spread evenly over the file; default: all.")] = None,
    shard: Annotated[str, typer.Option(help="Part i of n of these items, as i/n.")] = "1/1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    drafter: Annotated[
        str, typer.Option(help="ngram, standalone, eagle3, hybrid; none: teacher-only alone.")
    ] = "ngram",
    rows: Annotated[int | None, typer.Option(min=0, help="Tree budget: drafted rows.")] = None,
    depth: Annotated[int | None, typer.Option(min=0, help="Tree budget: depth.")] = None,
    mode: services.Mode = None,
    dtype: services.Dtype = None,
    numerics: services.Numerics = None,
    teacher_model: services.TeacherModel = None,
    draft_model: services.DraftModel = None,
    teacher_threads: services.TeacherThreads = None,
    draft_threads: services.DraftThreads = None,
    prefill_chunk: Annotated[int | None, typer.Option(min=1, help="Prompt tokens in one forward pass.")] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Ask this orchestrator, HOST:PORT, and launch nothing; its prefix cache must be off."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Turns asked first in every way and thrown away.")] = 1,
    against_transformers: Annotated[
        bool, typer.Option("--against-transformers", help="Time transformers' own greedy generate on every turn too.")
    ] = False,
    against_prompt_lookup: Annotated[
        bool, typer.Option("--against-prompt-lookup", help="And once more with transformers' own prompt lookup.")
    ] = False,
    near_tie_margin: Annotated[
        float | None, typer.Option(min=0, help="Widest near-tie, in logits; default: by the teacher's dtype.")
    ] = None,
) -> None:
    """Answer every turn teacher-only and with a drafter, alternately in the same processes, and compare."""
    try:
        settings = RunSettings(
            output=output,
            prompts=prompts,
            limit=limit,
            shard=Shard.parse(shard),
            max_tokens=max_tokens,
            drafter=drafter,
            rows=rows,
            depth=depth,
            mode=mode,
            dtype=dtype,
            numerics=numerics,
            teacher_model=teacher_model,
            draft_model=draft_model,
            teacher_threads=teacher_threads,
            draft_threads=draft_threads,
            prefill_chunk=prefill_chunk,
            server=server,
            warmup=warmup,
            against_transformers=against_transformers,
            against_prompt_lookup=against_prompt_lookup,
            near_tie_margin=near_tie_margin,
        )
        turns = sum(len(item.turns) for item in settings.items())
    except (ValueError, OSError) as error:
        _no_run(error)
    summary = console.run(_measured(settings, turns))
    answers.print(summary_table(summary))
    _report(summary)
    notes.print(f"written to {output}", markup=False)
    raise typer.Exit(NOT_EXACT if summary.failures else 0)


async def _measured(settings: RunSettings, turns: int) -> Summary:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=notes) as progress:
        shown = _Shown(progress, turns)
        try:
            return await run(settings, on_state=shown.state, on_turn=shown.turn)
        except (*console.EXPECTED, AskError, TraceError, OSError) as error:
            _no_run(error)


def _no_run(error: Exception) -> NoReturn:
    notes.print(f"error: {error or type(error).__name__}", style="red", markup=False)
    raise typer.Exit(NO_RUN)


class _Shown:
    """The run on a progress bar."""

    def __init__(self, progress: Progress, turns: int) -> None:
        self._progress = progress
        self._task = progress.add_task("waiting for the services", total=turns)
        self._exact = self._compared = 0
        self._speedups = 0.0

    def state(self, name: SectionName, state: State) -> None:
        self._progress.update(self._task, description=f"{name} {state}")

    def turn(self, record: TurnRecord) -> None:
        text = record.id
        if record.exact is not None and record.speedup is not None:
            self._compared += 1
            self._exact += record.exact
            self._speedups += record.speedup
            text = f"{self._exact}/{self._compared} exact, speed-up {self._speedups / self._compared:.2f}"
        self._progress.update(self._task, advance=1, description=text)


def _report(summary: Summary) -> None:
    """What a reader must not miss under the table."""
    for failure in summary.failures:
        notes.print(f"failed: {failure}", style="red", markup=False)
    ties = sum(divergence.near_tie for divergence in summary.first_divergences)
    if ties:
        notes.print(f"{ties} of {summary.turns} turns leave teacher-only at a near-tie; summary.json lists them")
    if summary.fallback_rounds:
        reasons = ", ".join(summary.fallback_reasons)
        rounds = f"{summary.fallback_rounds} of {summary.rounds} rounds"
        notes.print(f"{rounds} had no draft: {reasons}", style="yellow", markup=False)
    if summary.numerics.degraded_reason:
        notes.print(f"numerics: {summary.numerics.degraded_reason}", style="yellow", markup=False)
