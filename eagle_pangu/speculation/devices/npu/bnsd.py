"""Between the shapes of our attention kernels and BNSD: [batch, heads, rows, head_dim], contiguous."""

from __future__ import annotations

import torch


def slot_rows(query: torch.Tensor) -> torch.Tensor:
    """[kv_heads, rows, group, head_dim] -> [1, heads, rows, head_dim]; heads of one KV head stand together."""
    kv_heads, rows, group, head_dim = query.shape
    return query.transpose(1, 2).reshape(1, kv_heads * group, rows, head_dim).contiguous()


def grouped_rows(attended: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The way back: [1, heads, rows, head_dim] -> [kv_heads, rows, group, head_dim]."""
    _, heads, rows, head_dim = attended.shape
    return attended.view(kv_heads, heads // kv_heads, rows, head_dim).transpose(1, 2)


def heads_as_batch(table: torch.Tensor) -> torch.Tensor:
    """[heads, rows, head_dim] -> [heads, 1, rows, head_dim], so that each head may have its own mask."""
    return table[:, None].contiguous()
