"""A torch that cannot be imported because of torch_npu, explained in one line.

torch loads every back-end that is installed when it is imported itself, whatever device is wanted, and transformers
loads torch_npu. Where that comes without CANN, its libraries, both fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType


def explanation(error: BaseException) -> str | None:
    """What is wrong and what to do where torch_npu is the cause of a failed import; None for any other error."""
    causes = list(_causes(error))
    if not any(_is_of_torch_npu(cause) for cause in causes):
        return None
    return (
        f"torch_npu is installed and cannot be loaded ({_said(causes[-1])}). For device npu install CANN and source "
        "its set_env.sh. For any other device uninstall torch_npu: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from "
        "loading it, and does not keep transformers"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, the first cause last."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is_of_torch_npu(error: BaseException) -> bool:
    """Whether torch says so of its extension, or an import ended inside the package.

    An import that fails anywhere in the package counts, and any error at all while a module of it is executed.
    """
    if isinstance(error, RuntimeError) and "backend extension: torch_npu" in str(error):
        return True
    if isinstance(error, SyntaxError) and "torch_npu" in Path(error.filename or "").parts:
        return True  # found before anything of the module is executed
    through = [frame for frame in _frames(error.__traceback__) if _package(frame) == "torch_npu"]
    if isinstance(error, (ImportError, OSError)):
        return bool(through)
    return any(frame.f_code.co_name == "<module>" for frame in through)


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    """Those that the error came through."""
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _package(frame: FrameType) -> str:
    """The top-level package whose code it runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _said(error: BaseException) -> str:
    """The text, with the type before it where the text alone does not say what happened."""
    if isinstance(error, (ImportError, OSError, RuntimeError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
