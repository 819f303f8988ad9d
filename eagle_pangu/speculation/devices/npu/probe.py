"""Importing torch_npu, or saying what is missing and what to do about it.

`pip install` brings torch_npu without CANN, the libraries and kernels that it runs on; those come with Ascend's images
or installers. Nothing else in the project imports torch_npu, so that every other device works without it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from eagle_pangu.speculation.versions import release_of

_NO_PACKAGE = (
    "device npu: torch_npu is not installed; pip install 'eagle-pangu[npu]', on a host or in an image with CANN "
    "(deploy/ascend.md)"
)


def load_torch_npu() -> ModuleType:
    """torch_npu, imported, of torch's own version, with a device that it can use.

    Raises:
        RuntimeError: not so; the text says what is missing and what to do.
    """
    try:
        torch_npu = importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            raise RuntimeError(_NO_PACKAGE) from error
        raise RuntimeError(f"device npu: torch_npu needs the package {error.name}; pip install it") from error
    except (Exception, SystemExit) as error:  # a half-installed package may raise anything
        raise RuntimeError(
            f"device npu: torch_npu is installed and cannot be loaded ({_first_line(error)}); where a library is "
            "missing, install the CANN toolkit of torch_npu's version and source its set_env.sh before the start"
        ) from error
    _require_torch_version(_version(torch_npu))
    _require_device()
    return torch_npu


def _version(torch_npu: ModuleType) -> str:
    """Its own; what an uninstalled package left behind is importable and has none."""
    if not hasattr(torch_npu, "__version__"):
        places = ", ".join(getattr(torch_npu, "__path__", ())) or repr(torch_npu)
        raise RuntimeError(
            f"device npu: torch_npu has no version: {places} is a leftover or an incomplete installation; remove it, "
            "then pip install 'eagle-pangu[npu]'"
        )
    return str(torch_npu.__version__)


def _require_torch_version(version: str) -> None:
    """torch_npu x.y.z (with any suffix) is built against the binary interface of torch x.y.z, and no other."""
    wanted = release_of(torch.__version__)
    if release_of(version) != wanted:
        raise RuntimeError(
            f"device npu: torch_npu {version} does not belong to torch {torch.__version__}; install torch_npu {wanted} "
            f"(or {wanted}.postN), or the torch of torch_npu"
        )


def _require_device() -> None:
    try:
        present = torch.npu.is_available()  # type: ignore[attr-defined]  # torch_npu adds it
    except Exception as error:
        raise RuntimeError(
            f"device npu: the driver cannot be asked for devices ({_first_line(error)}); see whether `npu-smi info` "
            "works"
        ) from error
    if not present:
        raise RuntimeError(
            "device npu: no Ascend device is present; see whether `npu-smi info` lists one, whether /dev/davinci* is "
            "in this container, and what ASCEND_RT_VISIBLE_DEVICES leaves"
        )


def _first_line(error: BaseException) -> str:
    """With the type, where the text alone does not say what happened."""
    line = str(error).strip().partition("\n")[0]
    if line and isinstance(error, (ImportError, OSError, RuntimeError)):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
