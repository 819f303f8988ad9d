"""The checks of a device, on the CPU, and on devices with a fault each."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eagle_pangu.doctor import indices, on_device
from eagle_pangu.doctor.model_shape import ModelShape, read_shape
from eagle_pangu.doctor.results import Result
from eagle_pangu.speculation import devices
from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.attention.kernels import over_slot
from eagle_pangu.speculation.devices.base import Attention, AttentionError, HeadShape, Memory
from eagle_pangu.speculation.devices.cpu import CpuDevice
from eagle_pangu.speculation.linear import LinearKernel
from tests.models import tiny_llama
from tests.openpangu import toy_openpangu

SHAPE = ModelShape("small", heads=4, kv_heads=2, head_dim=16, hidden=64, inner=96, vocabulary=300)


def results_on(device: object, monkeypatch: pytest.MonkeyPatch, name: str = "cpu") -> dict[str, Result]:
    """Of every check, with that device under that name."""
    monkeypatch.setitem(devices._DEVICES, name, lambda: device)
    monkeypatch.setattr(on_device, "read_shape", lambda _model: SHAPE)
    return {result.name.removeprefix(f"{name}: "): result for result in on_device.check_devices([name], "small")}


def test_a_sound_device_passes_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    results = results_on(CpuDevice(), monkeypatch)
    assert set(results) == {"model", "device", *on_device.OF_DEVICE}
    assert {result.status for result in results.values()} == {"ok"}
    assert "GiB free" in results["memory"].text
    assert "sdpa agrees with eager attention" in results["attention"].text
    assert "float16 within" in results["products"].text
    assert "bitwise attention" in results["row counts"].text


class TurnedMask(CpuDevice):
    """Reads a mask the other way round, as an operator does where true means hidden."""

    def attention(self, name: str, heads: HeadShape) -> Attention:
        def turned(query: Any, key: Any, value: Any, keep: torch.Tensor, scale: float) -> torch.Tensor:
            return eager_attention(query, key, value, ~keep, scale)

        return Attention("turned", "", over_slot(turned), turned)


class FallenBack(CpuDevice):
    def attention(self, name: str, heads: HeadShape) -> Attention:
        return super().attention("eager", heads)._replace(fallback_reason="head_dim 17 is no multiple of 16")


class Refusing(CpuDevice):
    def attention(self, name: str, heads: HeadShape) -> Attention:
        raise AttentionError(f"no attention for {heads.head_dim}")


class ReducedPrecision(CpuDevice):
    """Cuts the inputs of float32 products to 11 bits of mantissa."""

    def linear_kernel(self, layer: nn.Linear) -> LinearKernel:
        weight = layer.weight.detach()

        def run(rows: torch.Tensor) -> torch.Tensor:
            if rows.dtype != torch.float32:
                return rows @ weight.T
            bits = torch.full((), -(2**13), dtype=torch.int32)
            cut = [(tensor.contiguous().view(torch.int32) & bits).view(torch.float32) for tensor in (rows, weight)]
            return cut[0] @ cut[1].T

        return run


class ShapedBits(CpuDevice):
    """A row's bits depend on how many rows stand beside it."""

    def linear_kernel(self, layer: nn.Linear) -> LinearKernel:
        weight = layer.weight.detach()
        return lambda rows: rows @ weight.T * (1 + 1e-4 * rows.shape[0])


class Broken(CpuDevice):
    def memory(self) -> Memory:
        raise RuntimeError("driver error 507899")


@pytest.mark.parametrize(
    ("device", "check", "said"),
    [
        (TurnedMask(), "attention", "turned differs from eager attention"),
        (FallenBack(), "attention", "eager takes the place of fused attention: head_dim 17"),
        (Refusing(), "attention", "no attention for 16"),
        (ReducedPrecision(), "products", "float32: expected at most"),
        (Broken(), "memory", "RuntimeError: driver error 507899"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, CpuDevice) else "",
)
def test_a_fault_fails_its_own_check_alone(
    device: CpuDevice, check: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = results_on(device, monkeypatch)
    assert [name for name, result in results.items() if result.status != "ok"] == [check]
    assert said in results[check].text


def test_bits_that_depend_on_the_row_count_are_a_finding_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    result = results_on(ShapedBits(), monkeypatch)["row counts"]
    assert result.status == "ok"
    assert "float32: bitwise does not hold: 64 -> 128 depends on the row count" in result.text


@pytest.mark.parametrize("name", indices.OPERATORS)
def test_an_operator_that_moves_other_values_on_the_device_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, calls = indices.OPERATORS[name], count()

    def wrong_on_the_device(table: torch.Tensor) -> torch.Tensor:
        moved = operator(table)
        return moved + 1 if next(calls) % 2 == 0 else moved  # the device comes first

    monkeypatch.setitem(indices.OPERATORS, name, wrong_on_the_device)
    result = results_on(CpuDevice(), monkeypatch)["indices"]
    assert result.status == "failed"
    assert f"{name} in float32, {name} in bfloat16, {name} in float16" in result.text


def test_a_fault_on_an_npu_says_how_to_find_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Broken()
    device.name = "npu"
    result = results_on(device, monkeypatch, name="npu")["memory"]
    assert "ASCEND_LAUNCH_BLOCKING=1" in result.text


@pytest.fixture
def no_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("device npu: torch_npu is not installed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(on_device.ascend_host, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(on_device, "installed", lambda _package: None)
    monkeypatch.setitem(devices._DEVICES, "npu", missing)
    monkeypatch.setattr(on_device, "read_shape", lambda _model: SHAPE)


@pytest.mark.usefixtures("no_accelerator")
def test_without_an_npu_every_check_of_it_is_listed_as_not_checked() -> None:
    results = {result.name: result for result in on_device.check_devices([], "small")}
    of_npu = [f"npu: {name}" for name in ("device", *on_device.OF_DEVICE)]
    assert [results[name].status for name in of_npu] == ["not checked"] * 6
    assert "no Ascend device here" in results["npu: device"].text
    assert [result.status for name, result in results.items() if name.startswith("cpu")] == ["ok"] * 6
    assert not [name for name in results if name.startswith("cuda")]


@pytest.mark.usefixtures("no_accelerator")
def test_an_npu_that_was_asked_for_or_is_half_there_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [result.status for result in on_device.check_devices(["npu"], "small")][1] == "failed"
    (tmp_path / "davinci0").touch()
    results = {result.name: result for result in on_device.check_devices([], "small")}
    assert results["npu: device"].status == "failed"
    (tmp_path / "davinci0").unlink()
    monkeypatch.setattr(on_device, "installed", lambda _package: "2.12.0")
    results = {result.name: result for result in on_device.check_devices([], "small")}
    assert results["npu: device"].status == "failed"


@pytest.mark.usefixtures("no_accelerator")
def test_what_an_uninstalled_torch_npu_left_is_a_fault_without_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    results = {result.name: result for result in on_device.check_devices([], "small")}
    assert results["npu: device"].status == "failed"


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"num_attention_heads": -4}, {"hidden_size": "x"}])
def test_a_model_that_cannot_be_read_fails_its_own_check_alone(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_llama(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    results = {result.name: result for result in on_device.check_devices(["cpu"], str(tmp_path))}
    assert (results["model"].status, next(iter(changes)) in results["model"].text) == ("failed", True)
    assert results["cpu: indices"].status == "ok"


def test_without_a_model_what_needs_no_sizes_is_checked_all_the_same() -> None:
    results = {result.name: result.status for result in on_device.check_devices(["cpu"], "nowhere")}
    assert results["model"] == "failed"
    checked = [name for name in on_device.OF_DEVICE if results[f"cpu: {name}"] == "ok"]
    assert checked == ["memory", "indices"]


def test_sizes_are_read_of_any_model_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_shape(str(tiny_llama(tmp_path / "llama")))
    assert shape[1:] == (4, 2, 16, 64, 96, 260)
    assert shape.linears[0] == (64, 128, False)
    assert read_shape(str(toy_openpangu(tmp_path / "pangu"))).head_dim == 16
    monkeypatch.setenv("EAGLE_PANGU_HOME", str(tmp_path))
    assert read_shape("smollm2-135m-instruct").heads == 9
