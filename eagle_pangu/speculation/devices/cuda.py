"""CUDA: cuBLAS linear layers, SDPA attention. The same interface as the CPU's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from eagle_pangu.speculation.devices.base import Attention, HeadShape, Memory
from eagle_pangu.speculation.devices.sdpa import sdpa_or_eager
from eagle_pangu.speculation.linear import LinearKernel


class CudaDevice:
    """`Device` for the current CUDA device."""

    name = "cuda"
    static_shapes = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "device cuda: torch finds no CUDA device; use device cpu, or install a CUDA build of torch"
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    def default_dtype(self) -> torch.dtype:
        """bfloat16 from Ampere on, float16 before."""
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16

    def configure_threads(self, threads: int) -> int:
        """Host threads matter little here; set all the same."""
        if threads:
            torch.set_num_threads(threads)
        return torch.get_num_threads()

    def linear_kernel(self, layer: nn.Linear) -> LinearKernel:
        """cuBLAS as torch calls it."""
        weight, bias = layer.weight.detach(), layer.bias.detach() if layer.bias is not None else None
        return lambda rows: F.linear(rows, weight, bias)

    def for_drafting(self) -> CudaDevice:
        """No rougher kernels here."""
        return self

    def attention(self, name: str, heads: HeadShape) -> Attention:
        """torch's SDPA, or the eager reference."""
        return sdpa_or_eager(name, self.name)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> Memory:
        """Memory of the device."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return Memory(total, free)
