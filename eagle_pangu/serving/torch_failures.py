"""A torch that cannot be imported because of torch_npu, explained in one line.

torch loads every back-end that is installed when it is imported itself, whatever device is wanted, and transformers
loads torch_npu. Where that comes without CANN, its libraries, both fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType


def explanation(error: BaseException) -> str | None:
    """What is wrong and what to do where torch_npu is the cause of a failed import; None for any other error."""
    causes = list(_causes(error))
    if not any(_is_of_torch_npu(cause) for cause in causes):
        return None
    return (
        f"torch_npu is installed and cannot be loaded ({causes[-1]}). For device npu install CANN and source its "
        "set_env.sh. For any other device uninstall torch_npu: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from "
        "loading it, and does not keep transformers"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, the first cause last."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is_of_torch_npu(error: BaseException) -> bool:
    """Whether torch says so of its extension, or an import ended inside the package."""
    if isinstance(error, RuntimeError) and "backend extension: torch_npu" in str(error):
        return True
    return isinstance(error, (ImportError, OSError)) and "torch_npu" in _packages(error.__traceback__)


def _packages(traceback: TracebackType | None) -> Iterator[str]:
    """Top-level packages whose code the error came through."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        traceback = traceback.tb_next
