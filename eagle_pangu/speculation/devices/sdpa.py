"""torch's own fused attention, and the choice on devices that have no other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.attention.kernels import over_slot
from eagle_pangu.speculation.devices.base import Attention, AttentionError


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """`scaled_dot_product_attention`, whose bool mask means keep; arguments and result as for `eager_attention`."""
    attended = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=keep, scale=scale)
    return attended[0]


def sdpa_or_eager(name: str, device: str) -> Attention:
    """See `Device.attention`: both serve any heads."""
    choices = {"sdpa": sdpa, "eager": eager_attention}
    chosen = "sdpa" if name == "auto" else name
    if chosen not in choices:
        raise AttentionError(f"attention {name} is not one of device {device}; expected auto, {', '.join(choices)}")
    return Attention(chosen, "", over_slot(choices[chosen]), choices[chosen])
