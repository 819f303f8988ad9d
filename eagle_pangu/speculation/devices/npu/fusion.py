"""Attention by `npu_fusion_attention`, the operator of training, as a named alternative.

It knows no actual lengths for a slot as it lies, so K and V are cut and copied in every layer, and its documentation
leaves graph capture out: slower than the operators of inference, and float32 besides.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from eagle_pangu.speculation.devices.npu.bnsd import grouped_rows, heads_as_batch, slot_rows
from eagle_pangu.speculation.devices.npu.masks import PlanMasks, hidden_of_heads
from eagle_pangu.speculation.plan import ForwardPlan


class FusionOperator(Protocol):
    """`torch_npu.npu_fusion_attention`."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_num: int,
        input_layout: str,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Attention [batch, heads, rows, head_dim], and six further results for a backward pass."""
        ...


class FusionAttention:
    """Both forms of `devices.base.Attention` by this operator."""

    def __init__(self, operator: FusionOperator) -> None:
        self._operator = operator
        self._masks = PlanMasks()

    def over_slot(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
    ) -> torch.Tensor:
        """See `AttentionKernel`."""
        mask = None if plan.is_chain and plan.rows == 1 else self._masks.of(plan, plan.columns)
        keys, values = (table[None, :, : plan.columns].contiguous() for table in (key, value))
        return grouped_rows(self._run(slot_rows(query), keys, values, mask, scale), len(key))

    def masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `MaskedAttention`: heads take the place of the batch, so that each may have its own mask."""
        query, key, value = map(heads_as_batch, (query, key, value))
        return self._run(query, key, value, hidden_of_heads(keep), scale)[:, 0]

    def _run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """[batch, heads, rows, head_dim] of query over [batch, kv_heads, columns, head_dim]."""
        return self._operator(query, key, value, query.shape[1], "BNSD", atten_mask=mask, scale=scale, sparse_mode=0)[0]
