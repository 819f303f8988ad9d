"""Runs the tests of `tests/simulated_npu` in a process of its own: in this one "npu" must stay unknown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/simulated_npu"
SECONDS = 1500


def run(marks: str) -> subprocess.CompletedProcess[str]:
    """All tests of the package with these marks, one after the other."""
    command = [sys.executable, "-m", "pytest", TESTS, "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Not a worker of the run that this process may be a part of.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_everything_runs_on_the_simulated_npu(marks: str) -> None:
    finished = run(marks)
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    assert " passed" in finished.stdout
    assert "skipped" not in finished.stdout


def test_a_plain_run_leaves_the_device_alone() -> None:
    """All tests are collected before any runs: had the package been entered, "npu" would be a device here."""
    assert not hasattr(torch, "npu")
