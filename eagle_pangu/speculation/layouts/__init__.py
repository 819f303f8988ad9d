"""How the rows of several sessions lie in one pass of an unmodified model."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers.cache_utils import Cache


class Layout(Protocol):
    """One pass: what the model is called with, and what its attention does.

    Attributes:
        input_ids, position_ids: [batch, rows] int64.
        cache: takes K and V of every layer.
        first_rows: where each segment's rows begin among the batch * rows of the pass, which they follow without gaps.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cache: Cache
    first_rows: list[int]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of every row over what it may see.

        Args:
            layer: index of the model's layer.
            query: [batch, heads, rows, head_dim].
            key, value: as `cache.update` gave them for this layer.
            scale: factor of the scores.

        Returns:
            [batch, rows, heads, head_dim].
        """
        ...
