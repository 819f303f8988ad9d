"""The doctor's checks of a card, on the simulated one: every operator that they run is there and called rightly."""

from __future__ import annotations

import pytest

from eagle_pangu.doctor import on_device
from eagle_pangu.doctor.model_shape import ModelShape

SHAPE = ModelShape("small", heads=4, kv_heads=2, head_dim=16, hidden=64, inner=96, vocabulary=300)


def test_every_check_of_the_doctor_passes_on_a_sound_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "read_shape", lambda _model: SHAPE)
    results = {result.name: result for result in on_device.check_devices(["npu"], "small")}
    assert {name: result.text for name, result in results.items() if result.status != "ok"} == {}
    assert set(results) == {"model", "npu: device", *(f"npu: {check}" for check in on_device.OF_DEVICE)}
    assert "npu_fused_infer_attention_score" in results["npu: attention"].text
