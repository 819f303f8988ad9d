"""`eagle-pangu bench-numerics`: the cost of `bitwise` over `free` numerics, as a table and a JSON file. Needs torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from eagle_pangu.cli.console import answers, fail, notes
from eagle_pangu.evaluation.machine import machine
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.models import ModelError, resolve_model


def bench_numerics(
    model: Annotated[str, typer.Option(help="Pulled model or transformers directory.")] = TeacherSettings().model,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device by name.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all.")] = 0,
    contexts: Annotated[str, typer.Option(help="Committed tokens, with commas between.")] = "256,512,1024,2048",
    rows: Annotated[str, typer.Option(help="Rows of a tree, the root included, with commas between.")] = "1,16",
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each shape under each policy.")] = 20,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Time one verification under bitwise and under free numerics, alternately in one process."""
    try:
        from eagle_pangu.evaluation.numerics_cost import CostSettings, load_engines, measure

        settings = CostSettings(_whole("contexts", contexts), _whole("rows", rows), repeats)
        engines = load_engines(resolve_model(model), dtype, device, threads, settings)
        with Progress(console=notes, transient=True) as progress:
            shapes = len(settings.contexts) * len(settings.rows)
            costs = list(progress.track(measure(*engines, settings), total=shapes, description="shapes"))
    except (ModelError, ValueError, RuntimeError, OSError, ImportError) as error:
        fail(error)
    table = Table(title=f"{dtype}, {device}, threads {threads or 'all'}")
    for heading in ("context", "rows", "bitwise ms", "free ms", "bitwise / free"):
        table.add_column(heading, justify="right")
    for cost in costs:
        figures = (f"{cost.bitwise_ms:.1f}", f"{cost.free_ms:.1f}", f"{cost.ratio:.2f}")
        table.add_row(str(cost.context), str(cost.rows), *figures)
    answers.print(table)
    if output is not None:
        used = {"model": model, "dtype": dtype, "device": device, "threads": threads, **asdict(settings)}
        content = {"costs": [asdict(cost) for cost in costs], "settings": used, **machine()}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _whole(name: str, text: str) -> tuple[int, ...]:
    """The numbers of "1,16".

    Raises:
        ValueError: anything but whole numbers >= 1.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"{name}: expected whole numbers >= 1 with commas between, got {text!r}")
    return tuple(int(part) for part in parts)
