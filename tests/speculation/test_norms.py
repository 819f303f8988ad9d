"""Fused norms: taken only where they give the model's own bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from eagle_pangu.speculation.norms import FusedRMSNorm, fuse_norms


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_a_plain_rms_norm_is_fused_and_keeps_its_bits(kind: type[nn.Module]) -> None:
    norm = kind(48)
    norm.weight.data.normal_()
    rows = 3 * torch.randn(7, 48)
    expected = norm(rows)
    model = nn.ModuleDict({"norm": norm})
    fuse_norms(model)
    assert isinstance(model["norm"], FusedRMSNorm)
    assert torch.equal(model["norm"](rows), expected)


def test_a_norm_of_another_formula_stays() -> None:
    model = nn.ModuleDict({"gemma": GemmaRMSNorm(48), "layer": nn.LayerNorm(48)})
    model["gemma"].variance_epsilon = 1e-6
    model["gemma"].weight.data.normal_()
    fuse_norms(model)
    assert type(model["gemma"]) is GemmaRMSNorm
    assert type(model["layer"]) is nn.LayerNorm


def test_a_norm_that_rounds_in_another_place_stays() -> None:
    norm = LlamaRMSNorm(576).to(torch.bfloat16)
    norm.weight.data.normal_()
    rows = torch.randn(16, 576, dtype=torch.bfloat16)
    expected = norm(rows)
    model = nn.ModuleDict({"norm": norm})
    fuse_norms(model)
    assert torch.equal(model["norm"](rows), expected)
