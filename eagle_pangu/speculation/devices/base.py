"""What the rest of the house may ask of a device.

`cpu`, `cuda` and `npu` implement one Protocol. No other module names a device: a new one is added by a module beside
this one and a line in the registry.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import nn

from eagle_pangu.speculation.attention import AttentionKernel
from eagle_pangu.speculation.attention.kernels import MaskedAttention
from eagle_pangu.speculation.linear import LinearKernel


class Memory(NamedTuple):
    """Bytes in all and free for new allocations, as the device reports them."""

    total: int
    free: int


class HeadShape(NamedTuple):
    """What an attention kernel must know of a model: query heads, KV heads, values of a head, and their dtype.

    slot_columns: of the longest slot, spare ones included; 0 where no slot is meant, as in a check of heads alone.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    slot_columns: int = 0


class Attention(NamedTuple):
    """How a device computes attention for a model, chosen once, when the model is loaded.

    name: "sdpa", "eager", or the operator's own name. fallback_reason: empty, or why the device's fused attention is
    not used. over_slot: of the rows of a pass over one slot. masked: under a dense mask; a batch of several sessions
    has its own mask for each of them: heads are batch * kv_heads then, and keep [1, batch * kv_heads, rows, columns].
    whole_slots: `over_slot` takes K and V as a slot holds them, whatever its length in use; else it cuts them, and each
    length is a shape of its own.
    """

    name: str
    fallback_reason: str
    over_slot: AttentionKernel
    masked: MaskedAttention
    whole_slots: bool = False


def dtype_name(dtype: torch.dtype) -> str:
    """As configurations and messages have it: "float32"."""
    return str(dtype).removeprefix("torch.")


class AttentionError(Exception):
    """The attention asked for does not exist on this device, or cannot serve the model's heads or slots; says why."""


class Device(Protocol):
    """One kind of device.

    Attributes:
        name: "cpu", "cuda" or "npu".
        torch_device: where tensors go.
        static_shapes: a shape that was not seen before is dear here (it is compiled, or captured): an engine rounds
            rows and slots up to few sizes.
    """

    name: str
    torch_device: torch.device
    static_shapes: bool

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

    def attention(self, name: str, heads: HeadShape) -> Attention:
        """Attention by name; "auto" is the device's best for these heads.

        Raises:
            AttentionError: no such attention here, or not for these heads.
        """
        ...

    def synchronize(self) -> None:
        """Wait for queued work, so that a clock means something."""
        ...

    def memory(self) -> Memory:
        """Memory in all and free, in bytes."""
        ...
