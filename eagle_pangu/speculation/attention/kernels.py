"""The three attention kernels behind one signature, chosen once by mode and numerics."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eagle_pangu.speculation.attention import AttentionKernel
from eagle_pangu.speculation.attention.blocked import blocked_attention
from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.plan import ForwardPlan

MaskedAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def eager_kernel() -> AttentionKernel:
    """`reference` mode, `free` numerics."""
    return _masked(eager_attention)


def fused_kernel(device: Device) -> AttentionKernel:
    """`performance` mode, `free` numerics: the device's own fused attention."""
    return _masked(device.fused_attention)


def bitwise_kernel(row_multiple: int) -> AttentionKernel:
    """`bitwise` numerics, both modes: float32 blocks in path order, whatever the model's dtype."""

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
    ) -> torch.Tensor:
        return blocked_attention(query.float(), key, value, plan, scale, row_multiple).to(query.dtype)

    return run


def _masked(attention: MaskedAttention) -> AttentionKernel:
    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
    ) -> torch.Tensor:
        kv_heads, rows, group, head_dim = query.shape
        stacked = query.reshape(kv_heads, rows * group, head_dim)
        attended = attention(stacked, key[:, : plan.columns], value[:, : plan.columns], plan.keep, scale)
        return attended.view(kv_heads, rows, group, head_dim)

    return run
