"""`eagle-pangu trace show|replay`: a trace for people, and a trace checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from eagle_pangu.cli.console import answers, fail, notes
from eagle_pangu.evaluation.replay import kept_tokens, replay
from eagle_pangu.evaluation.summary import PARTS
from eagle_pangu.evaluation.trace_file import RoundLine, TracedAnswer, TraceError, ends_within_a_line, read_trace

app = typer.Typer(no_args_is_help=True, help="Read and check the trace of an orchestrator.")

File = Annotated[Path, typer.Argument(help="Trace file, one JSON object a line.")]
RequestId = Annotated[str | None, typer.Option("--request", help="Only the requests of this id.")]

SHORT_NAMES = (*(part[:7] for part in PARTS), "total")


@app.command()
def show(file: File, request: RequestId = None) -> None:
    """Every round of every answer: time by part in milliseconds, tokens decided, and the tree (* accepted)."""
    for traced in _read(file, request):
        answers.print(_header(traced))
        answers.print(f"{'round':>5} {'rows':>4}", *(f"{part:>7}" for part in SHORT_NAMES), "  tokens", style="dim")
        for line in traced.rounds:
            times = [line.times_us.get(part, 0) for part in PARTS] + [line.total_us]
            figures = " ".join(f"{microseconds / 1000:7.1f}" for microseconds in times)
            tokens = " ".join(map(str, kept_tokens(line)))
            answers.print(f"{line.round:5} {len(line.tree.token_ids) - 1:4} {figures}   {tokens}")
            answers.print(f"{'':10} {_tree(line)}", markup=False)


@app.command(name="replay")
def replay_file(file: File, request: RequestId = None) -> None:
    """Re-derive every emitted token offline and compare; exit status 1 when a trace contradicts itself."""
    replays = [replay(traced) for traced in _read(file, request)]
    for each in replays:
        for fault in each.faults:
            answers.print(f"[red]{escape(each.request_id)}[/red] answer {each.answer}: {escape(fault)}")
    faulty = sum(bool(each.faults) for each in replays)
    unfinished = sum(not each.finished for each in replays)
    tokens = sum(len(each.token_ids) for each in replays)
    answers.print(
        f"{len(replays)} answers, {tokens} tokens re-derived, {faulty} contradicted, {unfinished} without an end"
    )
    raise typer.Exit(1 if faulty else 0)


def _read(file: Path, request: str | None) -> list[TracedAnswer]:
    try:
        traced = read_trace(file)
        if ends_within_a_line(file):
            notes.print(f"{file}: the last line is incomplete and left out", style="yellow", markup=False)
    except TraceError as error:
        fail(error)
    if request is not None:
        traced = [each for each in traced if each.request_id == request]
        if not traced:
            fail(f"{file}: no request {request!r}")
    return traced


def _header(traced: TracedAnswer) -> str:
    opened, end = traced.opened, traced.end
    ended = "no end" if end is None else f"{end.status}, {len(end.token_ids)} tokens, {end.finish_reason or 'cut off'}"
    fallbacks = f", {end.fallback_rounds} rounds without a draft" if end is not None and end.fallback_rounds else ""
    budget = f"{opened.budget.rows} rows, depth {opened.budget.depth}"
    prefill = f"{opened.prompt_tokens} prompt tokens in {opened.prefill_us / 1000:.1f} ms"
    name = escape(opened.request_id)
    drafter = f"drafter {opened.drafter or 'default'} ({budget})"
    return f"\n[bold]{name}[/bold] answer {traced.index}, {drafter}, {prefill}; {ended}{fallbacks}"


def _tree(line: RoundLine) -> str:
    """The tree in brackets: ``5(7*(9) 8)`` is root 5 with children 7 (accepted, its child 9 was not) and 8."""
    tree = line.tree
    below: list[list[str]] = [[] for _ in tree.token_ids]
    text = ""
    for row in reversed(range(len(tree.token_ids))):  # children stand after their parents
        mark = "*" if row in line.accepted_rows else ""
        text = f"{tree.token_ids[row]}{mark}" + (f"({' '.join(reversed(below[row]))})" if below[row] else "")
        if row < len(tree.parents) and 0 <= tree.parents[row] < row:
            below[tree.parents[row]].append(text)
    notes = [f"fallback: {line.fallback}"] if line.fallback else []
    notes += ["reopened"] if line.reopened else []
    return " ".join([text, *notes])
