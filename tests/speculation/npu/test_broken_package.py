"""A host where torch_npu is installed without CANN, and one without it: what runs, and what is said where nothing can.

torch imports every installed back-end by itself, so the failure comes before any code of ours. Each host is a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models import tiny_llama

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = "libhccl.so: cannot open shared object file: No such file or directory"

USE_THE_CPU = """
import sys
from pathlib import Path

sys.modules["torch_npu"] = None  # whoever imports it now fails
from tests.speculation.engines import bushy_tree, engine, prompt

for numerics, attention in (("free", "auto"), ("free", "eager"), ("bitwise", "auto")):
    own = engine(Path(sys.argv[1]), numerics=numerics, attention=attention)
    slot = own.open_slot()
    own.prefill(slot, prompt(9), want_logits=True)
    own.verify(slot, bushy_tree(5))
assert sys.modules["torch_npu"] is None
print("done")
"""


@pytest.fixture
def without_cann(tmp_path: Path) -> dict[str, str]:
    """The environment of a host whose torch_npu is the one of PyPI, as far as an import goes."""
    site = tmp_path / "site"
    package, metadata = site / "torch_npu", site / f"torch_npu-{torch.__version__}.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(f"raise ImportError({LIBRARY!r})\n")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {torch.__version__}\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return {**os.environ, "PYTHONPATH": str(site)}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


def test_torch_fails_as_we_take_it_to(without_cann: dict[str, str]) -> None:
    ended = run(without_cann, "-c", "import torch")
    assert "RuntimeError: Failed to load the backend extension: torch_npu" in ended.stderr


ENTRY_POINTS = {
    "teacher": ("-m", "teacher_service", "--port", "0", "--device", "cpu"),
    "draft": ("-m", "draft_service.main", "--port", "0", "--drafter", "standalone"),
    "command": ("-m", "eagle_pangu.cli.main", "bench-numerics"),
    "trainer": ("-m", "draft_service.training", "--output", "unused", "--prompts", "unused"),
}


@pytest.mark.parametrize(("name", "autoload"), [*((name, "1") for name in ENTRY_POINTS), ("teacher", "0")])
def test_every_entry_point_that_needs_torch_says_so_in_a_line(
    without_cann: dict[str, str], tmp_path: Path, name: str, autoload: str
) -> None:
    """torch can be told not to import it; transformers cannot."""
    model = str(tiny_llama(tmp_path / "model"))
    flags = {"command": ("--model", model), "trainer": ("--teacher", model)}.get(name, ("--model", model))
    ended = run({**without_cann, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}, *ENTRY_POINTS[name], *flags)
    assert ended.returncode == 1, ended
    assert "Traceback" not in ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    for word in (LIBRARY, "CANN", "set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "uninstall torch_npu"):
        assert word in last


@pytest.mark.parametrize("statement", ["raise KeyError('x')", "raise AssertionError('x')"])
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_whatever_it_raises_is_told_in_a_line(
    without_cann: dict[str, str], tmp_path: Path, name: str, statement: str
) -> None:
    (tmp_path / "site" / "torch_npu" / "__init__.py").write_text(statement)
    model = str(tiny_llama(tmp_path / "model"))
    flags = ("--teacher", model) if name == "trainer" else ("--model", model)
    ended = run({**without_cann, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, *ENTRY_POINTS[name], *flags)
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert "Error: " in ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("statement", "autoload"),
    [("", "0"), ("raise SystemExit(3)", "1"), ("def (", "0")],
)
def test_doctor_reports_to_the_end(without_cann: dict[str, str], tmp_path: Path, statement: str, autoload: str) -> None:
    """transformers imports it late: not with itself, but with the first model class."""
    if statement:
        (tmp_path / "site" / "torch_npu" / "__init__.py").write_text(statement)
    environment = {**without_cann, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    ended = run(environment, "-m", "eagle_pangu.cli.main", "doctor", "--json")
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    results = {result["name"]: result for result in json.loads(ended.stdout)["results"]}
    assert results["import torch"]["status"] == "failed"
    assert "uninstall torch_npu" in results["import torch"]["text"]
    assert results["devices"]["status"] == "not checked"


def test_the_cpu_neither_imports_nor_needs_it(tmp_path: Path) -> None:
    ended = run(dict(os.environ), "-c", USE_THE_CPU, str(tmp_path))
    assert ended.stdout.endswith("done\n"), ended.stderr
