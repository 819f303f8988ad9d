"""Versions of Python and of the packages, and whether they belong together. Imports none of the packages."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from importlib.util import find_spec

from eagle_pangu.doctor.compatibility import CANN_OF_TORCH_NPU, PYTHON_OF_TORCH, TABLE_DATE
from eagle_pangu.doctor.results import CheckFailedError, NotCheckedError, Result, run_check
from eagle_pangu.evaluation.machine import installed
from eagle_pangu.speculation.versions import release_of

PROJECT = "eagle-pangu"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "sentencepiece")
"""What the two model services compute and read with."""


def check_versions() -> Iterator[Result]:
    """Python, the packages, torch_npu."""
    yield run_check("python", _python)
    yield run_check("packages", _packages)
    yield run_check("torch_npu version", _torch_npu)


def _python() -> str:
    return f"Python {platform.python_version()} on {platform.machine()}"


def _packages() -> str:
    found = {name: installed(name) for name in PACKAGES}
    if missing := [name for name, number in found.items() if number is None]:
        raise CheckFailedError(f"not installed: {', '.join(missing)}; pip install '{PROJECT}[models]'")
    listed = ", ".join(f"{name} {number}" for name, number in found.items())
    if installed(PROJECT) is None:
        return f"{listed}; not compared with what {PROJECT} asks for, since it runs from its sources"
    if wrong := list(_outside_of_range(found)):
        raise CheckFailedError("; ".join(wrong))
    return listed


def _outside_of_range(found: dict[str, str | None]) -> Iterator[str]:
    from packaging.requirements import Requirement  # of the models extra, which was just found

    for text in requires(PROJECT) or ():
        asked = Requirement(text)
        of_models = asked.marker is not None and asked.marker.evaluate({"extra": "models"})
        number = found.get(asked.name)
        if of_models and number is not None and not asked.specifier.contains(number, prereleases=True):
            yield f"{asked.name} {number}: expected {asked.specifier}"


def _torch_npu() -> str:
    torch_npu, torch = installed("torch-npu"), installed("torch")
    if torch_npu is None and (found := find_spec("torch_npu")):
        places = ", ".join(found.submodule_search_locations or ())
        raise NotCheckedError(
            f"{places}: no installed package, and without its record no version; a leftover? Remove it where it is one"
        )
    if torch_npu is None:
        raise NotCheckedError("torch_npu is not installed; only device npu needs it")
    release = release_of(torch_npu)
    if torch is None or release_of(torch) != release:
        raise CheckFailedError(
            f"torch_npu {torch_npu} belongs to torch {release}, found torch {torch}; install the pair of one row of "
            f"Ascend's table, as torch 2.12.0 and torch_npu 2.12.0"
        )
    span = PYTHON_OF_TORCH.get(release.rpartition(".")[0])
    if span is not None and not span[0] <= sys.version_info[:2] <= span[1]:
        first, last = (f"{major}.{minor}" for major, minor in span)
        raise CheckFailedError(f"torch_npu {torch_npu} is built for Python {first} to {last}, not for this one")
    known = CANN_OF_TORCH_NPU.get(torch_npu)
    belongs = (
        f"belongs to CANN {known}" if known else f"is not in the table of {TABLE_DATE}: its CANN is not known here"
    )
    return f"torch_npu {torch_npu} matches torch {torch}; it {belongs}"
