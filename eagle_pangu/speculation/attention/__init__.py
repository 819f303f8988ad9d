"""Tree attention for unmodified transformers models: registered under one name, it follows the forward pass's plan.

transformers looks the function up by ``config._attn_implementation`` and hands it whatever keyword arguments the model
was called with; ours are `plan` and `kernel`. The mask function registered beside it builds nothing: the plan is the
mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from eagle_pangu.speculation.plan import ForwardPlan

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
    plan: ForwardPlan,
    kernel: AttentionKernel,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    return grouped_attention(query, key, value, plan, kernel, scaling), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plan is the mask."""


AttentionInterface.register(TREE_ATTENTION, _tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, _no_mask)
