"""The sizes of a model that decide which kernels run: attention heads and linear layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.checkpoints import read_config
from eagle_pangu.speculation.devices.base import HeadShape
from eagle_pangu.speculation.models import RELEASES, is_pulled, resolve_model


class Linear(NamedTuple):
    """One linear layer: values in, values out, and whether it makes the logits."""

    inputs: int
    outputs: int
    is_head: bool = False


class ModelShape(NamedTuple):
    """Sizes of a Llama-like model; projections of one input are one layer, as they are computed."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer shapes of a pass."""
        attended = self.heads * self.head_dim
        return (
            Linear(self.hidden, attended + 2 * self.kv_heads * self.head_dim),
            Linear(attended, self.hidden),
            Linear(self.hidden, 2 * self.inner),
            Linear(self.inner, self.hidden),
            Linear(self.hidden, self.vocabulary, is_head=True),
        )

    def attention_heads(self, dtype: torch.dtype) -> HeadShape:
        """As `Device.attention` wants them."""
        return HeadShape(self.heads, self.kv_heads, self.head_dim, dtype)


_DEFAULT = ModelShape("smollm2-135m-instruct, not pulled", 9, 3, 64, 576, 1536, 49152)


def read_shape(model: str) -> ModelShape:
    """The sizes of a pulled model, or of a transformers directory; the weights are not read.

    Raises:
        ModelError, CheckpointError: there is none, or it is not one that is served here.
    """
    if model == TeacherSettings().model and model in RELEASES and not is_pulled(model):
        return _DEFAULT
    config: Any = read_config(resolve_model(model))
    heads = int(config.num_attention_heads)
    return ModelShape(
        name=model,
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        hidden=int(config.hidden_size),
        inner=int(config.intermediate_size),
        vocabulary=int(config.vocab_size),
    )
