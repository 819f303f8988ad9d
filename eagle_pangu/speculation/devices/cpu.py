"""The CPU: oneDNN linear layers with weights packed once, SDPA attention."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn

from eagle_pangu.speculation.devices.base import Memory
from eagle_pangu.speculation.devices.sdpa import sdpa
from eagle_pangu.speculation.linear import LinearKernel


class CpuDevice:
    """`Device` for the host CPU."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def default_dtype(self) -> torch.dtype:
        """bfloat16 where the CPU has instructions for it, else float32: emulated, every row of a pass costs much."""
        return torch.bfloat16 if _has_bfloat16_instructions() else torch.float32

    def configure_threads(self, threads: int) -> int:
        """See `Device.configure_threads`."""
        torch.set_num_threads(threads or os.cpu_count() or 1)
        return torch.get_num_threads()

    def linear_kernel(self, layer: nn.Linear) -> LinearKernel:
        """oneDNN with packed weights where it computes the dtype natively, else torch's own kernel.

        `F.linear` packs the weight anew in each call, which for a few rows costs more than the product itself.
        """
        weight, bias = layer.weight.detach(), layer.bias.detach() if layer.bias is not None else None
        native = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _has_bfloat16_instructions())
        if not native or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return lambda rows: F.linear(rows, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

        def run(rows: torch.Tensor) -> torch.Tensor:
            return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # type: ignore[no-any-return]

        return run

    def fused_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """torch's SDPA."""
        return sdpa(query, key, value, keep, scale)

    def synchronize(self) -> None:
        """CPU operators return when they are done."""

    def memory(self) -> Memory:
        """Physical memory of the host."""
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES"))


def _has_bfloat16_instructions() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
