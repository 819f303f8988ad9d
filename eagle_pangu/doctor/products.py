"""Linear layers on the device against float64 on the CPU: whether a dtype computes as finely as its name says."""

from __future__ import annotations

import torch
from torch import nn

from eagle_pangu.doctor.model_shape import ModelShape
from eagle_pangu.doctor.results import CheckFailedError
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.devices.base import dtype_name

_ROWS = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_ROUNDINGS = {torch.float32: 64.0, torch.bfloat16: 2.0, torch.float16: 2.0}
"""Of the largest value, in units of the dtype's last place: float32 adds up in float32, the others in more than theirs.
Products that were cut to 11 bits of mantissa (TF32, HF32) are some thousand float32 places off."""


def check_products(device: Device, shape: ModelShape) -> str:
    """One layer of the model's in each dtype.

    Raises:
        CheckFailedError: names the dtype and how far off it is.
    """
    layer = shape.linears[1]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, layer.inputs, generator=generator)
    weight = torch.randn(layer.outputs, layer.inputs, generator=generator) / layer.inputs**0.5
    errors = {dtype: _error(device, rows.to(dtype), weight.to(dtype)) for dtype in _DTYPES}
    said = [f"{dtype_name(dtype)} within {error:.1f} places" for dtype, error in errors.items()]
    if wrong := [dtype for dtype, error in errors.items() if not error <= _MOST_ROUNDINGS[dtype]]:
        raise CheckFailedError(
            f"{', '.join(said)}; {dtype_name(wrong[0])}: expected at most {_MOST_ROUNDINGS[wrong[0]]:.0f}; is a "
            "reduced precision (TF32, HF32) switched on?"
        )
    return f"{layer.inputs} -> {layer.outputs} against float64: {', '.join(said)}"


def _error(device: Device, rows: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest, in last places of the largest value; both in the dtype that is asked about."""
    layer = nn.Linear(rows.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.to(device.torch_device), requires_grad=False)
    product = device.linear_kernel(layer)(rows.to(device.torch_device)).cpu()
    exact = rows.double() @ weight.double().T
    return float((product.double() - exact).abs().max() / exact.abs().max() / torch.finfo(product.dtype).eps)
