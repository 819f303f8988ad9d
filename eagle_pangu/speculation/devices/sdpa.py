"""torch's own fused attention, for the devices whose bool mask means keep."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """Arguments and result as for `Device.fused_attention`."""
    attended = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=keep, scale=scale)
    return attended[0]
