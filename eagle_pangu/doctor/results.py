"""What a check found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Status = Literal["ok", "failed", "not checked"]


class Result(NamedTuple):
    """name: of the check. text: what was found and, where it failed, what to do; else why it was not looked at."""

    name: str
    status: Status
    text: str


class CheckFailedError(Exception):
    """A check found a fault; the text says which, and what to do."""


class NotCheckedError(Exception):
    """A check has nothing to look at here; the text says why."""


def run_check(name: str, check: Callable[[], str]) -> Result:
    """The result of a check that returns what it found, or raises one of the errors above.

    Any other error is a failure, too, even a SystemExit: a check that breaks has found something, and the checks after
    it are wanted all the same.
    """
    try:
        return Result(name, "ok", check())
    except NotCheckedError as reason:
        return Result(name, "not checked", str(reason))
    except CheckFailedError as fault:
        return Result(name, "failed", str(fault))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 -- a stranger's package or file may raise anything
        return Result(name, "failed", f"{type(error).__name__}: {str(error).strip() or 'without a text'}")
