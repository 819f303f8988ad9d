"""`eagle-pangu ablate`: what one part of the system is worth, measured with it varied and all else kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle_pangu.cli import console, services
from eagle_pangu.cli.console import answers, notes
from eagle_pangu.cli.measuring import NOT_EXACT, no_run, shown
from eagle_pangu.evaluation.batch_ablation import BATCHINGS, SIZES, AblationSettings, ablate_batch
from eagle_pangu.evaluation.batch_table import TABLE_FILE, BatchRow, markdown
from eagle_pangu.evaluation.load_run import LoadSettings

app = typer.Typer(no_args_is_help=True, help="Measure what one part of the system is worth.")


@app.callback()
def ablate() -> None:
    """Measure what one part of the system is worth."""


@app.command()
def batch(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for table.md, results.json and all answers.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of both models.")],
    numerics: Annotated[str, typer.Option(help="bitwise or free.")],
    sizes: Annotated[str, typer.Option(help="Requests at once, ascending, with commas between.")] = ",".join(
        map(str, SIZES)
    ),
    batching: Annotated[str, typer.Option(help="Ways to share a pass, with commas between.")] = ",".join(BATCHINGS),
    drafter: Annotated[
        list[str] | None, typer.Option(help="By name; may be given several times; default: hybrid.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompt file; default: the set of this project.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Items, spread evenly over the file.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    rows: Annotated[int | None, typer.Option(min=0, help="Tree budget: drafted rows.")] = None,
    depth: Annotated[int | None, typer.Option(min=0, help="Tree budget: depth.")] = None,
    teacher_model: services.TeacherModel = None,
    draft_model: services.DraftModel = None,
    teacher_threads: services.TeacherThreads = None,
    draft_threads: services.DraftThreads = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the rows that are in the folder.")] = False,
) -> None:
    """Measure every way to share a pass under every batch size, against answers that were computed alone."""
    try:
        at_once = _sizes(sizes)
        settings = AblationSettings(
            load=LoadSettings(
                output=output,
                prompts=prompts,
                limit=limit,
                max_tokens=max_tokens,
                rows=rows,
                depth=depth,
                dtype=dtype,
                numerics=numerics,
                teacher_model=teacher_model,
                draft_model=draft_model,
                teacher_threads=teacher_threads,
                draft_threads=draft_threads,
                concurrency=max(at_once),
            ),
            sizes=at_once,
            batchings=_batchings(batching),
            drafters=tuple(drafter or ("hybrid",)),
            resume=resume,
        )
        settings.items()
    except (ValueError, OSError) as error:
        no_run(error)
    measured = console.run(_measured(settings))
    answers.print(markdown(measured, settings.notes), markup=False)
    failed = [row for row in measured if row.failures]
    for row in failed:
        name = f"{row.batching}, {row.drafter}, batch {row.size}"
        notes.print(f"failed: {name}: {'; '.join(row.failures)}", style="red", markup=False)
    notes.print(f"written to {output / TABLE_FILE}", markup=False)
    raise typer.Exit(NOT_EXACT if failed else 0)


async def _measured(settings: AblationSettings) -> list[BatchRow]:
    with shown(None) as progress:
        return await ablate_batch(
            settings,
            on_state=progress.state,
            on_reference=progress.reference,
            on_record=progress.record,
            on_row=lambda row: notes.print(
                f"{row.batching}, {row.drafter}, batch {row.size}: {row.tokens_per_second:.1f} tokens/s"
            ),
        )


def _batchings(text: str) -> tuple[str, ...]:
    """The names of "ragged,eqspec".

    Raises:
        ValueError: not a batching, or one twice.
    """
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in BATCHINGS:
            raise ValueError(f"batching: expected some of {', '.join(BATCHINGS)}, got {name!r}")
    if len({*names}) < len(names):
        raise ValueError(f"batching: expected each once, got {text!r}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    """The numbers of "1,16".

    Raises:
        ValueError: anything but ascending whole numbers >= 1.
    """
    parts = text.split(",")
    if all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        sizes = tuple(int(part) for part in parts)
        if sizes == tuple(sorted({*sizes})):
            return sizes
    raise ValueError(f"sizes: expected ascending whole numbers >= 1 with commas between, got {text!r}")
