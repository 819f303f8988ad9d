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
    return masked_kernel(eager_attention, _whole_mask)


def fused_kernel(device: Device) -> AttentionKernel:
    """`performance` mode, `free` numerics: the device's own fused attention."""
    return masked_kernel(device.fused_attention, _whole_mask)


def bitwise_kernel(row_multiple: int) -> AttentionKernel:
    """`bitwise` numerics, both modes: float32 blocks in path order, whatever the model's dtype."""

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
    ) -> torch.Tensor:
        return blocked_attention(query.float(), key, value, plan, scale, row_multiple).to(query.dtype)

    return run


def masked_kernel(attention: MaskedAttention, mask: Callable[[ForwardPlan], torch.Tensor]) -> AttentionKernel:
    """A kernel from attention under a dense mask.

    Args:
        attention: (query [kv_heads, rows * group, head_dim], key, value [kv_heads, columns, head_dim], keep, scale) ->
            as query.
        mask: [rows * group, columns] bool of a pass, True where a row may attend.
    """

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
    ) -> torch.Tensor:
        kv_heads, rows, group, head_dim = query.shape
        stacked = query.reshape(kv_heads, rows * group, head_dim)
        attended = attention(stacked, key[:, : plan.columns], value[:, : plan.columns], mask(plan), scale)
        return attended.view(kv_heads, rows, group, head_dim)

    return run


def _whole_mask(plan: ForwardPlan) -> torch.Tensor:
    return plan.keep
