"""What devices say of themselves, where it can be checked without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle_pangu.speculation.devices import get_device

MEBIBYTE = 2**20


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As much of CUDA as a device asks of it before it computes, where TF32 was switched on."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_card_that_only_emulates_bfloat16_computes_in_float16(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, has_bfloat16: bool
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return has_bfloat16 or including_emulation

    monkeypatch.setattr("torch.cuda.is_bf16_supported", supported)
    assert get_device("cuda").default_dtype() == dtype


@pytest.mark.usefixtures("card")
def test_float32_on_a_card_is_float32() -> None:
    get_device("cuda")
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a control group."""
    monkeypatch.setattr("eagle_pangu.speculation.devices.cpu.CONTROL_GROUP", tmp_path)
    return tmp_path


def test_the_host_has_memory_and_some_of_it_is_free(group: Path) -> None:
    memory = get_device("cpu").memory()
    assert 0 < memory.free < memory.total


def test_a_container_has_no_more_than_its_limit(group: Path) -> None:
    (group / "memory.max").write_text(f"{100 * MEBIBYTE}\n")
    (group / "memory.current").write_text(f"{70 * MEBIBYTE}\n")
    assert get_device("cpu").memory() == (100 * MEBIBYTE, 30 * MEBIBYTE)
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {20 * MEBIBYTE}\nactive_file 7\n")
    assert get_device("cpu").memory() == (100 * MEBIBYTE, 50 * MEBIBYTE)


def test_a_control_group_without_a_limit_changes_nothing(group: Path) -> None:
    without = get_device("cpu").memory()
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text(f"{70 * MEBIBYTE}\n")
    assert get_device("cpu").memory().total == without.total
