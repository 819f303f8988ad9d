"""Which row counts give a row the same bits on this device, i.e. whether `bitwise` numerics hold there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn

from eagle_pangu.doctor.model_shape import Linear, ModelShape
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.devices.base import dtype_name
from eagle_pangu.speculation.invariance import NoInvarianceError, attention_row_multiple, check_softmax
from eagle_pangu.speculation.linear import PROBED_ROWS, probe_row_counts


def check_row_counts(device: Device, shape: ModelShape) -> str:
    """What the probes at a teacher's start would find, in the default dtype and in float32.

    That `bitwise` does not hold is a finding, not a fault: the default becomes `free` there, and says so.
    """
    dtypes = dict.fromkeys((device.default_dtype(), torch.float32))
    return "; ".join([_attention(device, shape), *(_linears(device, shape, dtype) for dtype in dtypes)])


def _attention(device: Device, shape: ModelShape) -> str:
    try:
        multiple = attention_row_multiple(shape.kv_heads, shape.head_dim, device)
        check_softmax(shape.heads, device)
    except NoInvarianceError as error:
        return f"bitwise attention does not hold: {error}"
    return f"bitwise attention holds, in multiples of {multiple} rows"


def _linears(device: Device, shape: ModelShape, dtype: torch.dtype) -> str:
    name = dtype_name(dtype)
    settings = TeacherSettings()
    common = set(PROBED_ROWS)
    for linear in shape.linears:
        largest = settings.max_rows + 1 if linear.is_head else max(settings.max_rows + 1, settings.prefill_chunk)
        counts = _probe(device, linear, dtype, largest)
        if len(counts) < 2:
            return f"{name}: bitwise does not hold: {linear.inputs} -> {linear.outputs} depends on the row count"
        common &= set(counts) | {count for count in PROBED_ROWS if count > largest}
    return f"{name}: bitwise holds: row counts {', '.join(_runs(sorted(common)))} share their bits in every layer"


def _probe(device: Device, linear: Linear, dtype: torch.dtype, largest: int) -> Sequence[int]:
    layer = nn.Linear(linear.inputs, linear.outputs, bias=False, device="meta")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(linear.outputs, linear.inputs, generator=generator).to(device.torch_device, dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return probe_row_counts(device.linear_kernel(layer), linear.inputs, dtype, device.torch_device, largest)


def _runs(counts: Sequence[int]) -> Iterator[str]:
    """Counts as "1-17" where none of those that were tried is missing between."""
    place = {count: index for index, count in enumerate(PROBED_ROWS)}
    first = counts[0]
    for left, right in [*pairwise(counts), (counts[-1], None)]:
        if right is None or place[right] != place[left] + 1:
            yield str(first) if first == left else f"{first}-{left}"
            first = right if right is not None else first
