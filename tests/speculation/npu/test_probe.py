"""What is said where torch_npu cannot be used: what is missing, and what to do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.devices.npu.probe import load_torch_npu

TORCH = torch.__version__.partition("+")[0]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch_npu of torch's version, with one device."""
    module: Any = ModuleType("torch_npu")
    module.__version__ = TORCH
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    return module


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    real = importlib.import_module

    def fails(name: str) -> ModuleType:
        if name == "torch_npu":
            raise error
        return real(name)

    monkeypatch.setattr(importlib, "import_module", fails)


def test_without_the_package_the_extra_is_named() -> None:
    for load in (load_torch_npu, lambda: get_device("npu")):
        with pytest.raises(RuntimeError, match=r"torch_npu is not installed; pip install 'eagle-pangu\[npu\]'"):
            load()


def test_without_a_package_that_it_needs_that_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ModuleNotFoundError("No module named 'yaml'", name="yaml"))
    with pytest.raises(RuntimeError, match="torch_npu needs the package yaml"):
        load_torch_npu()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
        OSError("libascendcl.so: cannot open shared object file: No such file or directory"),
        RuntimeError("Failed to load the backend extension: torch_npu.\nmore"),
    ],
)
def test_without_cann_the_library_and_set_env_are_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failing(monkeypatch, error)
    with pytest.raises(RuntimeError) as refusal:
        load_torch_npu()
    assert f"cannot be loaded ({str(error).partition(chr(10))[0]})" in str(refusal.value)
    assert "set_env.sh" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("error", [AssertionError("x"), KeyError("x"), SyntaxError("x"), SystemExit("x"), OSError()])
def test_whatever_an_import_raises_is_told_with_its_type(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    failing(monkeypatch, error)
    with pytest.raises(RuntimeError, match=rf"cannot be loaded \({type(error).__name__}(: '?x'?)?\)"):
        load_torch_npu()


def test_what_an_uninstalled_package_left_is_told_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu" / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    try:
        with pytest.raises(RuntimeError, match=f"no version: {tmp_path / 'torch_npu'} is a leftover"):
            load_torch_npu()
    finally:
        sys.modules.pop("torch_npu", None)


@pytest.mark.parametrize("suffix", ["", ".post2", ".post4+git1a2b3c4", "rc1"])
def test_a_version_of_torchs_own_is_taken(installed: Any, suffix: str) -> None:
    installed.__version__ = TORCH + suffix
    assert load_torch_npu() is installed


@pytest.mark.parametrize("version", ["2.1.0", f"{TORCH.rpartition('.')[0]}.99", f"{TORCH}0", "unknown"])
def test_another_version_is_refused_with_both(installed: Any, version: str) -> None:
    installed.__version__ = version
    with pytest.raises(RuntimeError) as refusal:
        load_torch_npu()
    assert f"torch_npu {version} does not belong to torch {torch.__version__}; install torch_npu {TORCH}" in str(
        refusal.value
    )


def test_without_a_device_the_places_to_look_at_are_named(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"no Ascend device is present.*npu-smi info.*ASCEND_RT_VISIBLE_DEVICES"):
        load_torch_npu()


def test_a_driver_that_does_not_answer_is_named(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise RuntimeError("drvGetDevNum: 507008\nstack")

    monkeypatch.setattr(torch.npu, "is_available", fails)
    with pytest.raises(RuntimeError, match=r"driver cannot be asked for devices \(drvGetDevNum: 507008\)"):
        load_torch_npu()
