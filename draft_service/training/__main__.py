"""`python -m draft_service.training`, what `eagle-pangu train-draft` becomes: flags in, progress and a head out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draft_service.training.settings import TrainingError, TrainingSettings
from eagle_pangu.cli.console import INTERRUPTED, fail, launch, notes
from eagle_pangu.speculation.models import ModelError, resolve_model

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
DEFAULTS = TrainingSettings(teacher=Path(), output=Path(), prompts=Path())


@app.command()
def train_draft(
    teacher: Annotated[str, typer.Option(help="Pulled model or transformers directory that the head will draft for.")],
    output: Annotated[Path, typer.Option(help="Folder of everything made; the head lies in OUTPUT/head.")],
    prompts: Annotated[Path | None, typer.Option(help="Prompt file that the teacher answers first.")] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help="Instead: answers, .jsonl or .jsonl.gz, of id, greedy, prompt_ids, response_ids."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = DEFAULTS.max_new_tokens,
    draft_vocab: Annotated[int, typer.Option(help="Ids that the head can propose.")] = DEFAULTS.draft_vocab,
    max_tokens: Annotated[int, typer.Option(help="Most tokens whose features go to disk.")] = DEFAULTS.max_tokens,
    steps_ahead: Annotated[int, typer.Option(help="Steps of the training-time test.")] = DEFAULTS.steps_ahead,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = DEFAULTS.epochs,
    first_step_epochs: Annotated[
        int, typer.Option(help="How many of them, the first ones, learn step 0 alone, at a third of the cost.")
    ] = DEFAULTS.first_step_epochs,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = DEFAULTS.lr,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of one optimiser step.")] = DEFAULTS.batch_tokens,
    seed: Annotated[int, typer.Option(help="Of sampling, held-out part, order and weights.")] = DEFAULTS.seed,
    feature_norm: Annotated[
        str, typer.Option(help="each: norm every hidden state before they are joined; none: as SafeAILab's heads.")
    ] = DEFAULTS.feature_norm,
    autocast: Annotated[bool, typer.Option("--autocast", help="Compute the head in bfloat16.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the teacher: auto, float32, bfloat16 or float16.")] = DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="Device by name.")] = DEFAULTS.device,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all cores.")] = DEFAULTS.threads,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = DEFAULTS.checkpoint_every,
) -> None:
    """Train an EAGLE-3 head for a teacher, from the teacher's own answers.

    Stopped at any moment, the same command goes on where it was.
    """
    try:
        settings = TrainingSettings(
            teacher=resolve_model(teacher),
            output=output,
            prompts=prompts,
            answers=answers,
            max_new_tokens=max_new_tokens,
            draft_vocab=draft_vocab,
            max_tokens=max_tokens,
            steps_ahead=steps_ahead,
            epochs=epochs,
            first_step_epochs=first_step_epochs,
            lr=lr,
            batch_tokens=batch_tokens,
            seed=seed,
            feature_norm=feature_norm,  # type: ignore[arg-type]  # checked there
            autocast=autocast,
            dtype=dtype,
            device=device,
            threads=threads,
            checkpoint_every=checkpoint_every,
        )
        columns = (TextColumn("{task.description:<34}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=notes) as progress:
            # torch takes seconds; a wrong flag should not
            from transformers.utils import logging

            from draft_service.training.pipeline import run

            logging.disable_progress_bar()  # its own, of every loading
            head = run(settings, _Bars(progress))
    except (TrainingError, ModelError) as error:
        fail(error)
    except KeyboardInterrupt:
        notes.print("stopped; the same command goes on from here")
        raise typer.Exit(INTERRUPTED) from None
    print(head)  # noqa: T201 - the answer of the command


class _Bars:
    """The run on a bar for each stage; see `Screen`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stage = ""
        self._task: TaskID | None = None

    def begin(self, stage: str) -> None:
        self._stage = stage
        self._task = None

    def progress(self, done: int, total: int, what: str) -> None:
        description = f"{self._stage}: {what}"
        if self._task is None:
            self._task = self._progress.add_task(description, total=total, completed=done)
        self._progress.update(self._task, description=description, completed=done, total=total)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    launch(app, "eagle-pangu train-draft")
