"""Attention by `npu_fused_infer_attention_score`, version 1 or 2: two names for the same arguments.

What holds for every call: the layout is BNSD, in which a slot fits as it lies and a mask of one's own is allowed; K and
V are a slot's whole buffers, contiguous as the operator demands, never cut and never repeated over query heads, and the
actual length says how much of them counts; the scale is given, since its default is 1; `next_tokens` is left at its
default, which limits nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from eagle_pangu.speculation.devices.npu.bnsd import grouped_rows, heads_as_batch, slot_rows
from eagle_pangu.speculation.devices.npu.masks import PlanMasks, causal_mask, hidden_of_heads
from eagle_pangu.speculation.plan import ForwardPlan

OWN_MASK, RIGHT_DOWN_CAUSAL = 0, 3
"""Values of `sparse_mode`. Its tree mode, 9, is for latent attention only."""

HIGH_PRECISION, CORRECTED_ROWS = 0, 2
"""Values of `inner_precise`. The documentation advises the second one under an own mask; one row has only the first."""


class FusedInferOperator(Protocol):
    """Either version of the operator."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention [batch, heads, rows, head_dim], and a log-sum-exp that is not asked for."""
        ...


class Arguments(NamedTuple):
    """What a version calls its number of query heads, the factor of the scores, and the columns that count."""

    heads: str
    scale: str
    columns: str


ARGUMENTS = {
    "npu_fused_infer_attention_score_v2": Arguments("num_query_heads", "softmax_scale", "actual_seq_kvlen"),
    "npu_fused_infer_attention_score": Arguments("num_heads", "scale", "actual_seq_lengths_kv"),
}
"""By operator, the better one first: the documentation recommends version 2 for what is asked for here."""


class FusedInferAttention:
    """Both forms of `devices.base.Attention` by one version of the operator.

    Args:
        operator: of torch_npu.
        arguments: their names in it.
        device: of the tensors.
    """

    def __init__(self, operator: FusedInferOperator, arguments: Arguments, device: torch.device) -> None:
        self._operator = operator
        self._arguments = arguments
        self._causal = causal_mask(device)
        self._masks = PlanMasks()

    def over_slot(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
    ) -> torch.Tensor:
        """See `AttentionKernel`. Every plan has one of three calls: one row, a chain, or a mask of its own."""
        if not plan.is_chain or plan.padding:
            options = self._own_mask(self._masks.of(plan, key.shape[1]))
        elif plan.rows > 1:
            options = {"atten_mask": self._causal, "sparse_mode": RIGHT_DOWN_CAUSAL, "inner_precise": HIGH_PRECISION}
        else:
            options = {}  # the one row, the newest, sees all that counts
        attended = self._run(slot_rows(query), key[None], value[None], plan.columns, scale, options)
        return grouped_rows(attended, len(key))

    def masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `MaskedAttention`: heads take the place of the batch, so that each may have its own mask.

        Copies what is not contiguous, K and V mostly: for the algorithms of comparison and windowed heads.
        """
        options = self._own_mask(hidden_of_heads(keep))
        query, key, value = map(heads_as_batch, (query, key, value))
        return self._run(query, key, value, key.shape[2], scale, options)[:, 0]

    def _own_mask(self, mask: torch.Tensor) -> dict[str, Any]:
        """Options for a mask [1 or batch, 1, rows, columns] over whole buffers."""
        precision = CORRECTED_ROWS if mask.shape[2] > 1 else HIGH_PRECISION
        return {"atten_mask": mask, "sparse_mode": OWN_MASK, "inner_precise": precision}

    def _run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        columns: int,
        scale: float,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """[batch, heads, rows, head_dim] of query over the first columns of [batch, kv_heads, capacity, head_dim]."""
        names = self._arguments
        own = {names.heads: query.shape[1], names.scale: scale, names.columns: [columns]}
        return self._operator(
            query, key, value, num_key_value_heads=key.shape[1], input_layout="BNSD", **own, **options
        )[0]
