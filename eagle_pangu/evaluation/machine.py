"""Where a figure was measured: processor, cores, versions. Imports none of the packages that it names."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("eagle-pangu", "torch", "transformers", "tokenizers", "numpy", "grpcio")


def machine() -> dict[str, object]:
    """Processor name, cores usable by this process, operating system, and versions; None for what is not installed."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}},
    }


def installed(package: str) -> str | None:
    """Its version; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
