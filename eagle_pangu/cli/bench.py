"""`eagle-pangu bench`: flags in; progress, a table, and the run's files out.

With a load asked for it hands over to `bench_load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eagle_pangu.cli import console, measuring, services
from eagle_pangu.cli.bench_load import bench_load
from eagle_pangu.cli.console import answers, notes
from eagle_pangu.cli.measuring import NOT_EXACT, Shown, no_run, report, shown
from eagle_pangu.evaluation.load_run import LoadSettings
from eagle_pangu.evaluation.records import TurnRecord
from eagle_pangu.evaluation.run import RunSettings, run
from eagle_pangu.evaluation.sharding import Shard
from eagle_pangu.evaluation.soak_run import SoakSettings
from eagle_pangu.evaluation.summary import Summary
from eagle_pangu.evaluation.tables import summary_table


def bench(
    output: Annotated[
        Path, typer.Option(help="Folder for turns.jsonl or answers.jsonl, summary.json, trace.jsonl and logs.")
    ],
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
    batching: measuring.Batching = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Load run: so many clients in a closed loop; with --arrival-rate the most at once."),
    ] = None,
    arrival_rate: Annotated[
        float | None, typer.Option(help="Load run: requests a second, arriving at random (Poisson).")
    ] = None,
    soak: Annotated[
        float | None,
        typer.Option(min=0, help="Endurance run of --concurrency clients: uneven sessions, cancels, so many seconds."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Load run: take the reference answers of an earlier one, from its folder.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Load run: of random arrivals, lengths and cancels; default: 0.")
    ] = None,
) -> None:
    """Answer every turn teacher-only and with a drafter, alternately in the same processes, and compare.

    A load run asks first turns: alone and teacher-only, then under load, and compares these.
    """
    try:
        common: dict[str, Any] = {
            "output": output,
            "prompts": prompts,
            "limit": limit,
            "shard": Shard.parse(shard),
            "max_tokens": max_tokens,
            "drafter": drafter,
            "rows": rows,
            "depth": depth,
            "mode": mode,
            "dtype": dtype,
            "numerics": numerics,
            "teacher_model": teacher_model,
            "draft_model": draft_model,
            "teacher_threads": teacher_threads,
            "draft_threads": draft_threads,
            "prefill_chunk": prefill_chunk,
            "batching": batching,
            "server": server,
            "warmup": warmup,
            "against_transformers": against_transformers,
            "against_prompt_lookup": against_prompt_lookup,
            "near_tie_margin": near_tie_margin,
        }
        load: dict[str, Any] = {
            "concurrency": concurrency,
            "arrival_rate": arrival_rate,
            "soak_seconds": soak,
            "reference": reference,
            "seed": seed,
        }
        load = {name: value for name, value in load.items() if value is not None}
        kind = SoakSettings if soak is not None else LoadSettings if load else RunSettings
        settings = kind(**common, **load)
        turns = sum(len(item.turns) for item in settings.items())
    except (ValueError, OSError) as error:
        no_run(error)
    if isinstance(settings, LoadSettings):
        bench_load(settings)
    summary = console.run(_measured(settings, turns))
    answers.print(summary_table(summary))
    report(summary, summary.turns, summary.failures)
    notes.print(f"written to {output}", markup=False)
    raise typer.Exit(NOT_EXACT if summary.failures else 0)


async def _measured(settings: RunSettings, turns: int) -> Summary:
    with shown(turns) as progress:
        return await run(settings, on_state=progress.state, on_turn=_TurnsShown(progress).turn)


class _TurnsShown:
    """Turns on a progress bar."""

    def __init__(self, progress: Shown) -> None:
        self._progress = progress
        self._exact = self._compared = 0
        self._speedups = 0.0

    def turn(self, record: TurnRecord) -> None:
        text = record.id
        if record.exact is not None and record.speedup is not None:
            self._compared += 1
            self._exact += record.exact
            self._speedups += record.speedup
            text = f"{self._exact}/{self._compared} exact, speed-up {self._speedups / self._compared:.2f}"
        self._progress.step(text)
