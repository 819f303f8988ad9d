"""What devices with a memory of their own have in common: torch's own linear layers, and a host that only steers."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from eagle_pangu.speculation.linear import LinearKernel


class Accelerator:
    """A part of `Device`."""

    def configure_threads(self, threads: int) -> int:
        """Host threads matter little here; set all the same."""
        if threads:
            torch.set_num_threads(threads)
        return torch.get_num_threads()

    def linear_kernel(self, layer: nn.Linear) -> LinearKernel:
        """As torch calls it on this device."""
        weight, bias = layer.weight.detach(), layer.bias.detach() if layer.bias is not None else None
        return lambda rows: F.linear(rows, weight, bias)

    def for_drafting(self) -> Self:
        """No rougher kernels here."""
        return self
