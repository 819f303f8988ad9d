"""`eagle-pangu demo`: three processes, one streamed answer, and the same answer teacher-only, compared.

Both answers are timed alike, at the client: tokens after the first, over the time from the first to the last.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.table import Table

from eagle_pangu.cli import services
from eagle_pangu.cli.console import EXPECTED, answers, fail, notes, run
from eagle_pangu.cli.generate import user_says
from eagle_pangu.cli.models import pull_with_progress
from eagle_pangu.client.client import GenerationClient
from eagle_pangu.serving.configuration import load_settings
from eagle_pangu.serving.settings import Settings
from eagle_pangu.speculation.models import RELEASES
from protos.v1 import generation_pb2

TEACHER_ONLY = "none"
WARM_UP_TOKENS = 4
# Editing a text of the prompt is what prompt lookup is for; a chat about anything else gains less (see `bench`).
PROMPT = """Correct the spelling of this text and write it out in full:

The old lighthouse stood on the northern cliff. Evry evening the keeper climbed its two hundred steps, lit the great \
lamp, and watched the ships pass in the dark. In winter the storms came from the west, and the keeper slept beside the \
lamp so that it woud never go out.

When the war began, the lamp was covered, and for three years no ship saw its light. The keeper wrote letters to her \
brother, repaired the stairs, and kept the lenses clean. On the first night of peace she climbed the two hundred steps \
again, and the fishermen who saw the beam from the sea rang there bells until morning."""


@dataclass
class TimedAnswer:
    """What came back, and when."""

    token_ids: list[int] = field(default_factory=list)
    first_tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    speculation: generation_pb2.SpeculationStats = field(default_factory=generation_pb2.SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        """After the first tokens, prefill left out; 0 when nothing followed them."""
        seconds = self.last_at - self.first_at
        return (len(self.token_ids) - self.first_tokens) / seconds if seconds > 0 else 0.0


def demo(
    prompt: Annotated[str, typer.Option(help="What to say to the model.")] = PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 200,
    drafter: Annotated[
        str | None, typer.Option(help="By name; default: hybrid for a model of `eagle-pangu models list`.")
    ] = None,
    dtype: services.Dtype = None,
    mode: services.Mode = None,
    numerics: services.Numerics = None,
    teacher_threads: services.TeacherThreads = None,
) -> None:
    """Show the whole system on a real model: pull it if needed, answer with and without a draft, compare."""
    try:
        model = load_settings().teacher.model
        if model in RELEASES:
            pull_with_progress(RELEASES[model])
            drafter = drafter or "hybrid"  # a head comes with the project for each of them
        settings = services.ServiceFlags(
            dtype=dtype, mode=mode, numerics=numerics, drafter=drafter, teacher_threads=teacher_threads, port=0
        ).settings()
    except EXPECTED as error:
        fail(error)
    if not run(_compare(settings, prompt, max_tokens)):
        raise typer.Exit(1)


async def _compare(settings: Settings, prompt: str, max_tokens: int) -> bool:
    async with services.launched(settings) as trio:
        drafted, plain = await trio.unless_died(_answer_twice(trio.target, prompt, max_tokens))
    identical = drafted.token_ids == plain.token_ids
    answers.print(_table(drafted, plain, identical=identical))
    if lost := drafted.speculation.fallback_rounds:
        notes.print(f"{lost} rounds had no draft: {', '.join(drafted.speculation.fallback_reasons)}", style="yellow")
    return identical


async def _answer_twice(target: str, prompt: str, max_tokens: int) -> tuple[TimedAnswer, TimedAnswer]:
    """With the default drafter, shown as it comes, and teacher-only."""
    async with GenerationClient(target) as client:
        for drafter in ("", TEACHER_ONLY):
            await _ask(client, prompt, WARM_UP_TOKENS, drafter, show=False)
        answers.print(f"{prompt}\n", style="dim", markup=False)
        drafted = await _ask(client, prompt, max_tokens, "", show=True)
        with notes.status("the same prompt, teacher-only"):
            return drafted, await _ask(client, prompt, max_tokens, TEACHER_ONLY, show=False)


async def _ask(client: GenerationClient, prompt: str, max_tokens: int, drafter: str, *, show: bool) -> TimedAnswer:
    options = generation_pb2.GenerationOptions(chat=user_says(prompt), max_tokens=max_tokens, drafter=drafter)
    answer = TimedAnswer()
    async for delta in client.generate_stream(options):
        answer.last_at = time.monotonic()
        if not answer.token_ids:
            answer.first_at = answer.last_at
            answer.first_tokens = len(delta.token_ids)
        answer.token_ids += delta.token_ids
        if delta.HasField("speculation"):
            answer.speculation = delta.speculation
        if show:
            answers.print(delta.text, end="", markup=False)
    if show:
        answers.print("\n")
    return answer


def _table(drafted: TimedAnswer, plain: TimedAnswer, *, identical: bool) -> Table:
    table = Table("", f"draft: {drafted.speculation.drafter}", "teacher-only")
    table.add_row("tokens", f"{len(drafted.token_ids)}", f"{len(plain.token_ids)}")
    table.add_row("rounds", f"{drafted.speculation.rounds}", f"{plain.speculation.rounds}")
    table.add_row(
        "tokens per round",
        f"{drafted.speculation.tokens_per_round:.2f}",
        f"{plain.speculation.tokens_per_round:.2f}",
    )
    table.add_row("tokens/s", f"{drafted.tokens_per_second:.1f}", f"{plain.tokens_per_second:.1f}")
    speed_up = drafted.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    table.add_row("speed-up", f"{speed_up:.2f} ×", "")
    table.add_row("identical", "yes" if identical else "[bold red]NO[/bold red]", "")
    return table
