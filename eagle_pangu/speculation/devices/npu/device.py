"""An Ascend NPU: torch's own linear layers, the fused attention of torch_npu. The same interface as the others."""

from __future__ import annotations

from typing import Any

import torch

from eagle_pangu.speculation.devices.accelerator import Accelerator
from eagle_pangu.speculation.devices.base import Attention, HeadShape, Memory
from eagle_pangu.speculation.devices.npu.choice import choose_attention
from eagle_pangu.speculation.devices.npu.probe import load_torch_npu


class NpuDevice(Accelerator):
    """`Device` for the current Ascend device: the first one that ASCEND_RT_VISIBLE_DEVICES leaves.

    `bitwise` numerics compute in float32 by bmm, gather, index_select, masked_fill, softmax, constant padding, products
    and sums element by element. torch_npu has a kernel of the card for each (aclnnBatchMatMul, aclnnGather,
    aclnnIndexSelect, aclnnInplaceMaskedFillScalar, aclnnSoftmax, aclnnConstantPadNd); products in float32 are
    documented for Atlas A2 and later. Whether a row's bits depend on its company there is measured at start, as
    everywhere (`invariance`).

    Raises:
        RuntimeError: torch_npu cannot be used here; says what is missing.
    """

    name = "npu"
    static_shapes = True

    def __init__(self) -> None:
        self._torch_npu = load_torch_npu()
        self._npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
        self.torch_device = torch.device("npu", self._npu.current_device())
        # float32 means float32: with HF32 the cube unit cuts the inputs of a product to 11 bits of mantissa. Off is the
        # documented default of matmul; whoever runs this process may have changed it, and `bitwise` is judged by it.
        self._npu.matmul.allow_hf32 = False

    def default_dtype(self) -> torch.dtype:
        """bfloat16; float16 on the chips that have no bfloat16."""
        return torch.bfloat16 if self._npu.is_bf16_supported() else torch.float16

    def attention(self, name: str, heads: HeadShape) -> Attention:
        """See `choose_attention`; compares what it gives with eager attention on this device."""
        return choose_attention(name, heads, self._torch_npu, self.torch_device)

    def synchronize(self) -> None:
        """Wait for the current stream; an error of an earlier operator may only come to light here."""
        self._npu.synchronize(self.torch_device)

    def memory(self) -> Memory:
        """Memory of the device."""
        free, total = self._npu.mem_get_info(self.torch_device)
        return Memory(total, free)
