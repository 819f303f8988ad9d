"""Linear layers of a model that read the same tensor, computed as one product: fewer and larger calls a layer.

For few rows a call costs more than its arithmetic: Q, K and V are one product here, gate and up another. The model code
stays unmodified: it calls its projections one by one, the first call computes all of them, and each gets its own
columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read one tensor, in the order the model calls them (Llama, Qwen2, Qwen3 and their kin)."""


class SharedProduct(nn.Module):
    """Several linear layers side by side: [..., in_features] -> one [..., out_features] a layer."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        first = layers[0]
        self.linear = nn.Linear(first.in_features, sum(self.sizes), first.bias is not None, device="meta")
        self.linear.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
        if first.bias is not None:
            self.linear.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
        # Not attributes of their own: setting one on a module costs more than a small operator.
        self._pending: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """Output of one of the layers; the first asks for the product, the last lets go of it."""
        if index == 0 or not self._pending or inputs is not self._pending[0][0]:
            self._pending[:] = [(inputs, self.linear(inputs).split(self.sizes, dim=-1))]
        output = self._pending[0][1][index]
        if index == len(self.sizes) - 1:
            self._pending.clear()
        return output


class Projection(nn.Module):
    """One layer of a `SharedProduct`, in the place of its `nn.Linear`."""

    def __init__(self, product: SharedProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self.product.part(self.index, inputs)


def share_products(model: nn.Module) -> None:
    """Join the layers named in `SAME_INPUT` wherever a module holds all of a group, as plain layers of one kind."""
    for module in list(model.modules()):
        for names in SAME_INPUT:
            layers = [getattr(module, name, None) for name in names]
            if not all(type(layer) is nn.Linear for layer in layers):
                continue
            plain = [layer for layer in layers if isinstance(layer, nn.Linear)]
            if len({(layer.in_features, layer.bias is None) for layer in plain}) > 1:
                continue
            product = SharedProduct(plain)
            for index, name in enumerate(names):
                setattr(module, name, Projection(product, index))
