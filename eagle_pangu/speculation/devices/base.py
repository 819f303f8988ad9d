"""What the rest of the house may ask of a device.

`cpu` and `cuda` are here; `npu` (torch_npu) is a third implementation of the same Protocol. No other module names a
device: a new one is added by a module beside this one and a line in the registry.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import nn

from eagle_pangu.speculation.linear import LinearKernel


class Memory(NamedTuple):
    """Bytes in all and free for new allocations, as the device reports them."""

    total: int
    free: int


class Device(Protocol):
    """One kind of device.

    Attributes:
        name: "cpu" or "cuda".
        torch_device: where tensors go.
    """

    name: str
    torch_device: torch.device

    def default_dtype(self) -> torch.dtype:
        """The dtype that this device computes best: what ``dtype = "auto"`` means."""
        ...

    def configure_threads(self, threads: int) -> int:
        """Set the host threads of one operator, 0 for all cores; returns the count in force."""
        ...

    def linear_kernel(self, layer: nn.Linear) -> LinearKernel:
        """The fastest form of a linear layer on this device for few rows, the layer's weight given up to it."""
        ...

    def for_drafting(self) -> Device:
        """The same device with faster, rougher kernels where it has any: what a draft computes is never trusted."""
        ...

    def fused_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Masked attention in the device's fused kernel.

        Args:
            query: [kv_heads, rows, head_dim].
            key, value: [kv_heads, columns, head_dim], never repeated over query heads.
            keep: [rows, columns] bool, True where a row may attend; the device translates the convention. A batch of
                several sessions has its own mask for each of them: heads are batch * kv_heads then, and keep
                [1, batch * kv_heads, rows, columns].
            scale: factor of the scores.

        Returns:
            [kv_heads, rows, head_dim] in the query's dtype.
        """
        ...

    def synchronize(self) -> None:
        """Wait for queued work, so that a clock means something."""
        ...

    def memory(self) -> Memory:
        """Memory in all and free, in bytes."""
        ...
