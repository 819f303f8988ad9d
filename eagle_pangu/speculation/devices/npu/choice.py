"""Which attention a model gets on an Ascend device: chosen once, when the model is loaded, and never changed after.

A model asks by name. "auto" is the fused operator of inference, and eager attention where that cannot serve the model:
the reason is kept, logged and reported. What is asked for by its own name is had or refused.
"""

from __future__ import annotations

from types import ModuleType

import torch

from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.attention.kernels import over_slot
from eagle_pangu.speculation.devices.base import Attention, AttentionError, HeadShape
from eagle_pangu.speculation.devices.comparison import compare_with_eager
from eagle_pangu.speculation.devices.npu.fused_infer import ARGUMENTS, FusedInferAttention
from eagle_pangu.speculation.devices.npu.fusion import FusionAttention
from eagle_pangu.speculation.devices.npu.limits import FUSED_INFER, FUSION
from eagle_pangu.speculation.devices.sdpa import sdpa

FUSION_OPERATOR = "npu_fusion_attention"
NAMES = ("auto", *ARGUMENTS, FUSION_OPERATOR, "sdpa", "eager")


def choose_attention(name: str, heads: HeadShape, torch_npu: ModuleType, device: torch.device) -> Attention:
    """See `Device.attention`.

    Args:
        name: one of `NAMES`.
        heads: of the model.
        torch_npu: whose operators.
        device: of the tensors; the comparison at start runs there.

    Raises:
        AttentionError: no such attention, or it cannot serve these heads here.
    """
    if name not in NAMES:
        raise AttentionError(f"attention {name} is not one of device npu; expected {', '.join(NAMES)}")
    if name == "eager":
        return _eager("")
    if name != "auto":
        return _compared(name, heads, torch_npu, device)
    present = next((operator for operator in ARGUMENTS if hasattr(torch_npu, operator)), None)
    if present is None:
        return _eager(f"torch_npu {torch_npu.__version__} has none of {', '.join(ARGUMENTS)}")
    try:
        return _compared(present, heads, torch_npu, device)
    except AttentionError as error:
        return _eager(str(error))


def _eager(reason: str) -> Attention:
    return Attention("eager", reason, over_slot(eager_attention), eager_attention)


def _compared(name: str, heads: HeadShape, torch_npu: ModuleType, device: torch.device) -> Attention:
    attention = _built(name, heads, torch_npu, device)
    compare_with_eager(attention, heads, device)
    return attention


def _built(name: str, heads: HeadShape, torch_npu: ModuleType, device: torch.device) -> Attention:
    if name == "sdpa":  # any heads: it picks a kernel of its own, and turns the mask round itself
        return Attention(name, "", over_slot(sdpa), sdpa)
    operator = getattr(torch_npu, name, None)
    if operator is None:
        raise AttentionError(f"{name} is not in torch_npu {torch_npu.__version__}")
    limits = FUSION if name == FUSION_OPERATOR else FUSED_INFER
    if exceeded := limits.exceeded(heads):
        raise AttentionError(f"{name}: {exceeded}")
    if name == FUSION_OPERATOR:
        fusion = FusionAttention(operator)
        return Attention(name, "", fusion.over_slot, fusion.masked)
    fused = FusedInferAttention(operator, ARGUMENTS[name], device)
    return Attention(name, "", fused.over_slot, fused.masked, whole_slots=True)
