"""What this host or container has of Ascend, read from its files: devices, the driver, CANN. No library is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from eagle_pangu.doctor.compatibility import CANN_OF_TORCH_NPU
from eagle_pangu.doctor.results import CheckFailedError, NotCheckedError, Result, run_check
from eagle_pangu.evaluation.machine import installed

DEVICE_FILES = Path("/dev")
DRIVER = Path("/usr/local/Ascend/driver/version.info")
NO_DEVICE = "no Ascend device here (no /dev/davinci*)"

_MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
"""Device files that every container with a card needs besides the card's own."""

_CANN_FILES = ("*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "*/ascend_*_install.info", "version.cfg")
"""Under ASCEND_HOME_PATH; where the toolkit says its version depends on the release."""

_VERSION = re.compile(r"^\s*(?:\w*_)?version\s*=\s*\[?([\w.]+)", re.IGNORECASE | re.MULTILINE)


def check_ascend_host() -> Iterator[Result]:
    """Device files, driver, CANN."""
    yield run_check("ascend devices", _devices)
    yield run_check("ascend driver", _driver)
    yield run_check("cann", _cann)


def has_device() -> bool:
    """Whether a card is in this host or container."""
    return any(re.fullmatch(r"davinci\d+", file.name) for file in DEVICE_FILES.glob("davinci*"))


def _devices() -> str:
    if not has_device():
        raise NotCheckedError(NO_DEVICE)
    present = sorted(file.name for file in DEVICE_FILES.glob("davinci*") if file.name not in _MANAGERS)
    if missing := [name for name in _MANAGERS if not (DEVICE_FILES / name).exists()]:
        raise CheckFailedError(
            f"{', '.join(present)} without /dev/{missing[0]}: pass it to the container (deploy/ascend.md), or repair "
            "the driver"
        )
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return f"{', '.join(present)}; ASCEND_RT_VISIBLE_DEVICES " + (
        f"= {visible}" if visible is not None else "is not set"
    )


def _driver() -> str:
    if not has_device():
        raise NotCheckedError(NO_DEVICE)
    number = _version_in(DRIVER)
    if number is None:
        raise CheckFailedError(f"{DRIVER} cannot be read: mount it, or install the driver; see `npu-smi info`")
    return f"driver {number}"


def _cann() -> str:
    torch_npu, home = installed("torch-npu"), os.environ.get("ASCEND_HOME_PATH")
    if not home:
        if torch_npu is None:
            raise NotCheckedError("ASCEND_HOME_PATH is not set, and torch_npu, which needs CANN, is not installed")
        raise CheckFailedError("ASCEND_HOME_PATH is not set: install CANN and source its set_env.sh before the start")
    files = [file for pattern in _CANN_FILES for file in sorted(Path(home).glob(pattern))]
    found = next(((file, number) for file in files if (number := _version_in(file))), None)
    if found is None:
        raise CheckFailedError(f"no version of CANN is to be read under ASCEND_HOME_PATH = {home}: is it installed?")
    file, number = found
    expected = CANN_OF_TORCH_NPU.get(torch_npu or "")
    if expected and not number.upper().startswith(expected.upper()):
        raise CheckFailedError(f"CANN {number} ({file}): torch_npu {torch_npu} belongs to CANN {expected}")
    belongs = f"as torch_npu {torch_npu} wants it" if expected else "not compared with torch_npu"
    return f"CANN {number} ({file}), {belongs}"


def _version_in(file: Path) -> str | None:
    try:
        found = _VERSION.search(file.read_text("utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None
