"""CUDA: cuBLAS linear layers, SDPA attention. The same interface as the CPU's."""

from __future__ import annotations

import torch

from eagle_pangu.speculation.devices.accelerator import Accelerator
from eagle_pangu.speculation.devices.base import Attention, HeadShape, Memory
from eagle_pangu.speculation.devices.sdpa import sdpa_or_eager


class CudaDevice(Accelerator):
    """`Device` for the current CUDA device."""

    name = "cuda"
    static_shapes = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "device cuda: torch finds no CUDA device; use device cpu, or install a CUDA build of torch"
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        torch.backends.cuda.matmul.allow_tf32 = False  # some images switch it on; float32 is to be float32

    def default_dtype(self) -> torch.dtype:
        """bfloat16 from Ampere on, float16 before."""
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16

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
