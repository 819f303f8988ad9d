"""torch's own fused attention, and the choice on devices that have no other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.attention.kernels import over_slot
from eagle_pangu.speculation.devices.base import Attention, AttentionError
from eagle_pangu.speculation.plan import ForwardPlan


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """`scaled_dot_product_attention`, whose bool mask means keep; arguments and result as for `eager_attention`."""
    attended = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=keep, scale=scale)
    return attended[0]


def sdpa_over_slot(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, scale: float
) -> torch.Tensor:
    """See `AttentionKernel`. torch would turn a bool mask into one to add in every layer anew."""
    stacked = query.flatten(1, 2)[None]
    columns = slice(plan.columns)
    mask = None if plan.sees_all else plan.added(query.dtype)
    own_key, own_value = key[None, :, columns], value[None, :, columns]
    attended = F.scaled_dot_product_attention(stacked, own_key, own_value, attn_mask=mask, scale=scale)
    return attended.view(query.shape)


def sdpa_or_eager(name: str, device: str) -> Attention:
    """See `Device.attention`: both serve any heads."""
    if name in ("auto", "sdpa"):
        return Attention("sdpa", "", sdpa_over_slot, sdpa)
    if name == "eager":
        return Attention(name, "", over_slot(eager_attention), eager_attention)
    raise AttentionError(f"attention {name} is not one of device {device}; expected auto, sdpa, eager")
