"""`eagle-pangu bench-options`: what sampling, processors and log-probabilities cost a round, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import grpc.aio
import typer
from rich.progress import Progress
from rich.table import Table

from eagle_pangu.cli import console, services
from eagle_pangu.cli.console import answers, fail, notes
from eagle_pangu.client.client import GenerationClient
from eagle_pangu.evaluation.options_cost import WAYS, RoundCost, measure, ratio
from eagle_pangu.evaluation.prompts import PromptItem, default_prompts, load_prompts, spread
from eagle_pangu.serving.settings import Settings


def bench_options(
    prompts: Annotated[Path | None, typer.Option(help="Prompt file; default: the set of this project.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Items, spread evenly over the file.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 64,
    drafter: Annotated[str, typer.Option(help="Of all ways; none: teacher-only.")] = "hybrid",
    dtype: services.Dtype = None,
    teacher_model: services.TeacherModel = None,
    teacher_threads: services.TeacherThreads = None,
    draft_threads: services.DraftThreads = None,
) -> None:
    """Ask prompts greedily, with every option, and with every option but those that leave few tokens in play.

    By turns, in the same processes; what is compared is the time of a round.
    """
    try:
        items = spread(default_prompts() if prompts is None else load_prompts(prompts), limit)
        flags = services.ServiceFlags(
            dtype=dtype,
            drafter=drafter,
            teacher_threads=teacher_threads,
            draft_threads=draft_threads,
            teacher_model=teacher_model,
            port=0,
        )
        settings = flags.settings()
    except (*console.EXPECTED, ValueError, OSError) as error:
        fail(error)
    costs = console.run(_measured(settings, items, drafter, max_tokens))
    table = Table("prompt", title=f"milliseconds of a round, {drafter}")
    for way in WAYS:
        table.add_column(way, justify="right")
        table.add_column("rows", justify="right")
    for cost in costs:
        table.add_row(cost.id, *(f"{figure:.2f}" for way in WAYS for figure in (cost.ms[way], cost.rows[way])))
    answers.print(table)
    for way in WAYS[1:]:
        answers.print(f"{way} / greedy, mean: {ratio(costs, way):.3f}")


async def _measured(settings: Settings, items: list[PromptItem], drafter: str, max_tokens: int) -> list[RoundCost]:
    async with services.launched(settings) as trio, GenerationClient(trio.target) as client:
        costs: list[RoundCost] = []
        with Progress(console=notes, transient=True) as progress:
            task = progress.add_task("prompts", total=len(items))
            try:
                async for cost in measure(client, items, drafter=drafter, max_tokens=max_tokens):
                    costs.append(cost)
                    progress.update(task, advance=1)
            except grpc.aio.AioRpcError as error:
                fail(f"{error.code().name}: {error.details()}")
    return costs
