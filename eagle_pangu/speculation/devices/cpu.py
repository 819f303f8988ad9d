"""The CPU: oneDNN linear layers with weights packed once, SDPA attention."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from eagle_pangu.speculation.devices.base import Attention, HeadShape, Memory
from eagle_pangu.speculation.devices.sdpa import sdpa_or_eager
from eagle_pangu.speculation.linear import LinearKernel

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Of a container's own processes, as it sees them (cgroup v2)."""


class CpuDevice:
    """`Device` for the host CPU.

    Args:
        eight_bits: linear layers with weights of 8 bits and inputs rounded to 8 bits as they come.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    static_shapes = False

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
        """oneDNN with packed weights, in float32 where the CPU does not compute the dtype natively.

        `F.linear` packs the weight anew in each call, which for a few rows costs more than the product itself.
        """
        weight, bias = layer.weight.detach(), layer.bias.detach() if layer.bias is not None else None
        if self._eight_bits:
            return _eight_bit_kernel(weight, bias)
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return lambda rows: F.linear(rows, weight, bias)
        if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _has_bfloat16_instructions()):
            return _packed_kernel(weight, bias)
        return _WidenedKernel(weight, bias)

    def for_drafting(self) -> CpuDevice:
        """A few rows take as long as reading the weights does: 8 bits a weight are a quarter of float32's."""
        return CpuDevice(eight_bits=_has_eight_bit_products())

    def attention(self, name: str, heads: HeadShape) -> Attention:
        """torch's SDPA, or the eager reference."""
        return sdpa_or_eager(name, self.name)

    def synchronize(self) -> None:
        """CPU operators return when they are done."""

    def memory(self) -> Memory:
        """Of the host, or of the container where that is less; what holds cached files counts as free."""
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
        if (available := _figure(Path("/proc/meminfo"), "MemAvailable:")) is not None:
            free = 1024 * available
        limit = _figure(CONTROL_GROUP / "memory.max")
        used = _figure(CONTROL_GROUP / "memory.current")
        if limit is not None and used is not None:
            files = _figure(CONTROL_GROUP / "memory.stat", "inactive_file") or 0
            total, free = min(total, limit), min(free, limit - used + files)
        return Memory(total, max(0, free))


def _figure(file: Path, name: str = "") -> int | None:
    """The number behind a name, or at the start of a file of one; None where there is none (no such file, no limit)."""
    try:
        words = next(line for line in file.read_text().splitlines() if line.startswith(name)).removeprefix(name).split()
        return int(words[0])
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _packed_kernel(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # type: ignore[no-any-return]

    return run


class _WidenedKernel:
    """For a dtype of 16 bits that the CPU has no instructions for: the product in float32, its result rounded.

    Emulated, every row costs as much as the first one (72 rows of bfloat16: 60 times one row, here 5 times). One row
    alone is faster emulated, since half as many bytes are read. Takes the memory of both forms of the weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._wide = _packed_kernel(weight.float(), None if bias is None else bias.float())

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.unrounded(rows).to(rows.dtype)

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        """See `RoundingKernel`."""
        if rows.numel() == rows.shape[-1]:
            return F.linear(rows, self._weight, self._bias)
        return self._wide(rows.float())


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
