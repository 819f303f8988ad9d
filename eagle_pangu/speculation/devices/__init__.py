"""Devices by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eagle_pangu.speculation.devices.base import Device, Memory
from eagle_pangu.speculation.devices.cpu import CpuDevice
from eagle_pangu.speculation.devices.cuda import CudaDevice
from eagle_pangu.speculation.devices.npu.device import NpuDevice

__all__ = ["Device", "Memory", "get_device", "resolve_dtype"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEVICES: dict[str, Callable[[], Device]] = {"cpu": CpuDevice, "cuda": CudaDevice, "npu": NpuDevice}


def get_device(name: str) -> Device:
    """The device of that name.

    Raises:
        ValueError: no such device.
        RuntimeError: the device is known and not usable here; the text says what is missing.
    """
    if name not in _DEVICES:
        raise ValueError(f"device: expected one of {', '.join(_DEVICES)}, got {name!r}")
    return _DEVICES[name]()


def resolve_dtype(name: str, device: Device) -> torch.dtype:
    """The dtype of that name; "auto" is the one that the device computes best.

    Raises:
        ValueError: no such dtype.
    """
    if name == "auto":
        return device.default_dtype()
    if name not in _DTYPES:
        raise ValueError(f"expected one of auto, {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]
