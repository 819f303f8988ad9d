"""`eagle-pangu up`: the three services as processes of this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from eagle_pangu.cli import services
from eagle_pangu.cli.console import EXPECTED, answers, fail, notes, run
from eagle_pangu.serving.processes import ProcessDiedError
from eagle_pangu.serving.settings import Settings
from eagle_pangu.serving.trio import Trio


def up(
    context: typer.Context,
    port: Annotated[int | None, typer.Option(help="Port of the orchestrator; 0: any. Default: 50050.")] = None,
    dtype: services.Dtype = None,
    mode: services.Mode = None,
    numerics: services.Numerics = None,
    drafter: services.Drafter = None,
    teacher_threads: services.TeacherThreads = None,
    draft_threads: services.DraftThreads = None,
    teacher_model: services.TeacherModel = None,
    draft_model: services.DraftModel = None,
    check_indices: services.CheckIndices = False,
    log_directory: services.LogDirectory = None,
) -> None:
    """Start teacher, draft and orchestrator; Ctrl-C drains them.

    Takes --config FILE and every other field as --SECTION.FIELD VALUE too, as --teacher.slots 4 (see
    `eagle-pangu config --help`).
    """
    flags = services.ServiceFlags(
        *(dtype, mode, numerics, drafter, teacher_threads, draft_threads, teacher_model, draft_model, port),
        check_indices=check_indices,
    )
    try:
        settings = flags.settings(context.args)
    except EXPECTED as error:
        fail(error)
    run(_serve(settings, log_directory), interrupted=0)


async def _serve(settings: Settings, log_directory: Path | None) -> None:
    async with services.launched(settings, log_directory) as trio:
        host, _, port = trio.target.rpartition(":")
        server = "" if (host, port) == ("127.0.0.1", "50050") else f" --server {trio.target}"
        answers.print(f"orchestrator {trio.target}")
        notes.print(f"teacher {trio.teacher.target}, draft {trio.draft.target}")
        notes.print(f'try: eagle-pangu generate{server} "Write a haiku about trees."', markup=False)
        notes.print("Ctrl-C drains and stops.", style="dim")
        draft = asyncio.create_task(_tell_of_a_lost_draft(trio))
        try:
            await trio.died()
        finally:
            draft.cancel()


async def _tell_of_a_lost_draft(trio: Trio) -> None:
    try:
        await trio.draft.died()
    except ProcessDiedError as error:
        notes.print(f"{error}\ndecoding goes on without a draft", style="yellow", markup=False)
