"""Linear layers whose output bits do not depend on how many rows are computed together.

A matrix library chooses its kernel by the row count, and kernels sum in different orders. The row counts that were
*measured* to give a row the same bits form its invariance class; `InvariantLinear` runs any number of rows through
counts of that class only. It knows nothing of trees or models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

LinearKernel = Callable[[torch.Tensor], torch.Tensor]
"""[..., in_features] -> [..., out_features], same dtype; the leading dimensions multiply to the row count."""


@runtime_checkable
class RoundingKernel(Protocol):
    """A `LinearKernel` that rounds what it computed in a wider dtype."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """As a `LinearKernel`."""
        ...

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        """The same before rounding, in the wider dtype; for a row count at which nothing wider is computed, that."""
        ...


PROBED_ROWS = (*range(1, 18), 20, 24, 28, 32, 33, 40, 48, 56, 64, 65, *range(72, 257, 8))
"""Row counts that the probe tries. Only counts that were tried are ever used, so nothing is extrapolated."""

REFERENCE_ROWS = 16
"""The class is the one that holds this count: a tree of the default size costs about what one row costs."""


class KernelLinear(nn.Module):
    """A linear layer that runs a device's kernel; takes the place of an `nn.Linear` in an unmodified model."""

    def __init__(self, kernel: LinearKernel, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kernel = kernel
        self.in_features = in_features
        self.out_features = out_features
        # Some model code asks a projection for its weight's dtype; the kernel keeps its own (perhaps packed) copy.
        self.register_buffer("weight", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self.kernel(inputs)


class InvariantLinear(KernelLinear):
    """A `KernelLinear` held to the row counts of one invariance class."""

    def __init__(
        self,
        kernel: LinearKernel,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        row_counts: Sequence[int],
    ) -> None:
        super().__init__(kernel, in_features, out_features, dtype)
        self.row_counts = tuple(row_counts)
        self._members = frozenset(row_counts)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As the base, in blocks of counts that belong to the class; rows of zeros fill the last block up."""
        if inputs.numel() // self.in_features in self._members:
            return self.kernel(inputs)
        rows = inputs.reshape(-1, self.in_features)
        blocks = [self._filled_up(block) for block in torch.split(rows, self.row_counts[-1])]
        return torch.cat(blocks).view(*inputs.shape[:-1], self.out_features)

    def _filled_up(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        padded = self.row_counts[bisect_left(self.row_counts, count)]
        return self.kernel(F.pad(rows, (0, 0, 0, padded - count)))[:count]


def replace_linears(model: nn.Module, replacement: Callable[[nn.Linear], KernelLinear]) -> None:
    """Put a kernel layer in the place of every plain `nn.Linear` of a model; one that stands in several places once."""
    replacements: dict[int, KernelLinear] = {}
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is not nn.Linear:
                continue
            if id(layer) not in replacements:
                replacements[id(layer)] = replacement(layer)
            setattr(module, name, replacements[id(layer)])


def probe_row_counts(
    kernel: LinearKernel, in_features: int, dtype: torch.dtype, device: torch.device, largest: int
) -> tuple[int, ...]:
    """The tried row counts, at most `largest`, that give every row the same bits as `REFERENCE_ROWS` rows do.

    Kernels are chosen by shape and thread count, never by value, so random rows speak for all
    (`numerics` measurements: row position never mattered at a fixed count). Rounding would hide most differences from
    the probe, and not from every row of a model.
    """
    if isinstance(kernel, RoundingKernel):
        kernel = kernel.unrounded
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(PROBED_ROWS[-1], in_features, generator=generator).to(device=device, dtype=dtype)
    blocks = [kernel(block) for block in torch.split(rows, REFERENCE_ROWS)]
    reference = torch.cat(blocks)

    def agrees(count: int) -> bool:
        products = kernel(rows[:count])
        return products.dtype == reference.dtype and torch.equal(products, reference[:count])

    return tuple(count for count in PROBED_ROWS if count <= largest and agrees(count))
