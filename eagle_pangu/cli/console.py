"""Where the command line writes, and how it ends: answers on stdout, everything else on stderr, no tracebacks for what
the user can mend.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console

from eagle_pangu.serving.configuration import SettingsError
from eagle_pangu.serving.processes import ProcessDiedError
from eagle_pangu.serving.torch_failures import explanation
from eagle_pangu.speculation.models import ModelError

Result = TypeVar("Result")

INTERRUPTED = 130  # what a shell expects of a command ended by Ctrl-C

answers = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)


class CommandError(Exception):
    """The command cannot go on; the message is for the user."""


EXPECTED = (CommandError, ModelError, ProcessDiedError, SettingsError, TimeoutError)


def fail(message: object) -> NoReturn:
    """Say what is wrong and end with status 1."""
    _say(message)
    raise typer.Exit(1)


def launch(app: typer.Typer, name: str) -> NoReturn:
    """Run a command to the end of the process; a torch that torch_npu keeps from being imported is no traceback."""
    try:
        app(prog_name=name)
    except Exception as error:
        if explanation(error) is None:
            raise
        _say(error)
        sys.exit(1)
    sys.exit(0)


def _say(wrong: object) -> None:
    reason = explanation(wrong) if isinstance(wrong, Exception) else None
    notes.print(f"error: {reason or wrong}", style="red", markup=False)


def run(work: Coroutine[Any, Any, Result], *, interrupted: int = INTERRUPTED) -> Result:
    """Run to the end; SIGINT and SIGTERM cancel the work, which then cleans up.

    Args:
        work: What to do.
        interrupted: Exit status after a signal.
    """
    try:
        return asyncio.run(_until_signal(work))
    except asyncio.CancelledError:
        raise typer.Exit(interrupted) from None
    except EXPECTED as error:
        fail(error)


async def _until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await task
