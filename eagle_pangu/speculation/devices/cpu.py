"""The CPU: oneDNN linear layers with weights packed once, SDPA attention."""

from __future__ import annotations

import os
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from eagle_pangu.speculation.devices.base import Memory
from eagle_pangu.speculation.devices.sdpa import sdpa
from eagle_pangu.speculation.linear import LinearKernel


class CpuDevice:
    """`Device` for the host CPU.

    Args:
        eight_bits: linear layers with weights of 8 bits and inputs rounded to 8 bits as they come.
    """

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self, *, eight_bits: bool = False) -> None:
        self._eight_bits = eight_bits

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
        if self._eight_bits:
            return _eight_bit_kernel(weight, bias)
        native = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _has_bfloat16_instructions())
        if not native or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return lambda rows: F.linear(rows, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

        def run(rows: torch.Tensor) -> torch.Tensor:
            return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # type: ignore[no-any-return]

        return run

    def for_drafting(self) -> CpuDevice:
        """A few rows take as long as reading the weights does: 8 bits a weight are a quarter of float32's."""
        return CpuDevice(eight_bits=_has_eight_bit_products())

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


def _eight_bit_kernel(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    """torch's dynamically quantised product: a scale for each output, and one for the rows of a call.

    torch means to remove quantised tensors, but what is to follow them has no such kernel without VNNI instructions.
    """
    dtype, weight = weight.dtype, weight.float()
    scales = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None if bias is None else bias.float())

    def run(rows: torch.Tensor) -> torch.Tensor:
        # A bit less for the inputs: without VNNI, sums of two products saturate at 16 bits.
        product: torch.Tensor = torch.ops.quantized.linear_dynamic(rows.float(), packed, reduce_range=True)
        return product.to(dtype)

    return run


def _has_eight_bit_products() -> bool:
    present = hasattr(torch, "quantize_per_channel") and hasattr(torch.ops.quantized, "linear_dynamic")
    return present and torch.backends.quantized.engine in ("fbgemm", "onednn", "x86")


def _has_bfloat16_instructions() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
