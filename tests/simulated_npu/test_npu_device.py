"""`NpuDevice` as a service makes it: what it says of the device, what it sets, and the attention that it gives."""

from __future__ import annotations

import pytest
import torch

from eagle_pangu.speculation.devices import Memory, get_device
from eagle_pangu.speculation.devices.base import AttentionError, HeadShape
from eagle_pangu.speculation.devices.npu.choice import NAMES
from eagle_pangu.speculation.devices.npu.device import NpuDevice
from tests.simulated_npu import operators

HEADS = HeadShape(heads=8, kv_heads=2, head_dim=32, dtype=torch.bfloat16)


def test_it_is_the_current_device() -> None:
    device = get_device("npu")
    assert isinstance(device, NpuDevice)
    assert (device.name, device.torch_device, device.static_shapes) == ("npu", torch.device("npu", 0), True)
    assert device.memory() == Memory(total=64 * 2**30, free=48 * 2**30)
    assert device.for_drafting() is device
    device.synchronize()


def test_it_computes_bfloat16_where_the_chip_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_device("npu")
    assert device.default_dtype() == torch.bfloat16
    monkeypatch.setattr(torch.npu, "is_bf16_supported", lambda: False)
    assert device.default_dtype() == torch.float16


def test_float32_is_not_cut_to_hf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu.matmul, "allow_hf32", True)
    get_device("npu")
    assert torch.npu.matmul.allow_hf32 is False


def test_a_torch_npu_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "__version__", "2.1.0")
    with pytest.raises(RuntimeError, match=r"torch_npu 2\.1\.0 does not belong to torch"):
        get_device("npu")


@pytest.mark.parametrize("name", NAMES)
def test_every_attention_passes_its_comparison_on_the_device(name: str) -> None:
    attention = get_device("npu").attention(name, HEADS)
    assert attention.name == ("npu_fused_infer_attention_score_v2" if name == "auto" else name)
    assert attention.fallback_reason == ""


def test_what_cannot_be_had_is_refused_or_said() -> None:
    device = get_device("npu")
    with pytest.raises(AttentionError, match="got float32"):
        device.attention("npu_fused_infer_attention_score_v2", HEADS._replace(dtype=torch.float32))
    assert "got float32" in device.attention("auto", HEADS._replace(dtype=torch.float32)).fallback_reason


def test_a_linear_layer_is_torchs_own() -> None:
    layer = torch.nn.Linear(8, 4).to("npu")
    rows = torch.randn(3, 8)
    kernel = get_device("npu").linear_kernel(layer)
    expected = torch.nn.functional.linear(rows, layer.weight.cpu(), layer.bias.cpu())
    assert torch.equal(kernel(rows.to("npu")).cpu(), expected)
