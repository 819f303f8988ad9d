"""Tree-masked attention written out: scores, float32 softmax, sum. The reference that the others are compared with."""

from __future__ import annotations

import torch


def eager_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention under an arbitrary mask.

    Args:
        query: [kv_heads, rows, head_dim].
        key, value: [kv_heads, columns, head_dim].
        keep: [rows, columns] bool, True where a row may attend.
        scale: factor of the scores.

    Returns:
        [kv_heads, rows, head_dim] in the query's dtype.
    """
    scores = (query @ key.transpose(-1, -2)).float() * scale
    weights = scores.masked_fill(~keep, float("-inf")).softmax(dim=-1)
    return (weights.to(value.dtype) @ value).to(query.dtype)
