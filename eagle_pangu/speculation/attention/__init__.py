"""Tree attention for unmodified transformers models: registered under one name, it follows the forward pass's layout.

transformers looks the function up by ``config._attn_implementation`` and hands it whatever keyword arguments the model
was called with; ours is `layout`. The mask function registered beside it builds nothing: the plans of the sessions are
the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from eagle_pangu.speculation.plan import ForwardPlan

if TYPE_CHECKING:
    from eagle_pangu.speculation.layouts import Layout

TREE_ATTENTION = "eagle_pangu_tree"

AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ForwardPlan, float], torch.Tensor]
"""(query [kv_heads, rows, group, head_dim], key, value [kv_heads, capacity, head_dim], plan, scale) -> as query."""


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: ForwardPlan,
    kernel: AttentionKernel,
    scale: float,
) -> torch.Tensor:
    """Attention of the plan's rows over one slot, in the shapes of model code.

    Args:
        query: [1, heads, rows, head_dim].
        key, value: [1, kv_heads, capacity, head_dim].
        plan: of the pass.
        kernel: computes it.
        scale: factor of the scores.

    Returns:
        [1, rows, heads, head_dim].
    """
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    # Query heads of one KV head stand together, so K and V are never repeated.
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, head_dim).transpose(1, 2)
    attended = kernel(grouped, key[0], value[0], plan, scale)
    return attended.permute(1, 0, 2, 3).reshape(1, rows, heads, head_dim)


def _tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    return layout.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plans are the mask."""


AttentionInterface.register(TREE_ATTENTION, _tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, _no_mask)
