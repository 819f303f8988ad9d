"""Attention kernels behind one signature: from a function of dense masks, and the blocks of the `bitwise` policy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eagle_pangu.speculation.attention import AttentionKernel
from eagle_pangu.speculation.attention.blocked import blocked_attention
from eagle_pangu.speculation.plan import ForwardPlan

MaskedAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(query [kv_heads, rows, head_dim], key, value [kv_heads, columns, head_dim], keep, scale) -> as query, where keep is
[rows, columns] bool, True where a row may attend, or one of them for each head, [1, kv_heads, rows, columns]."""


def bitwise_kernel(row_multiple: int, *, shares_tail: bool) -> AttentionKernel:
    """`bitwise` numerics, both modes: float32 blocks in path order, whatever the model's dtype.

    Args:
        row_multiple, shares_tail: as probed; see `blocked_attention`.
    """

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
    ) -> torch.Tensor:
        attended = blocked_attention(query.float(), key, value, plan, scale, row_multiple, shares_tail=shares_tail)
        return attended.to(query.dtype)

    return run


def over_slot(attention: MaskedAttention, mask: Callable[[ForwardPlan], torch.Tensor] | None = None) -> AttentionKernel:
    """A kernel over the columns of a slot from attention under a dense mask.

    Args:
        attention: computes it; a group of query heads lies one below the other, so K and V are never repeated.
        mask: [rows * group, columns] bool of a pass, True where a row may attend; the plan's own when not given.
    """

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
    ) -> torch.Tensor:
        kv_heads, rows, group, head_dim = query.shape
        stacked = query.reshape(kv_heads, rows * group, head_dim)
        keep = plan.keep if mask is None else mask(plan)
        attended = attention(stacked, key[:, : plan.columns], value[:, : plan.columns], keep, scale)
        return attended.view(kv_heads, rows, group, head_dim)

    return run
