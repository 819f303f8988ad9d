"""Devices by name. `npu` will be a line in this registry and a module beside it."""

from __future__ import annotations

from collections.abc import Callable

from eagle_pangu.speculation.devices.base import Device, Memory
from eagle_pangu.speculation.devices.cpu import CpuDevice
from eagle_pangu.speculation.devices.cuda import CudaDevice

__all__ = ["Device", "Memory", "get_device"]

_DEVICES: dict[str, Callable[[], Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}


def get_device(name: str) -> Device:
    """The device of that name.

    Raises:
        ValueError: no such device.
        RuntimeError: the device is known and not usable here; the text says what is missing.
    """
    if name not in _DEVICES:
        raise ValueError(f"device: expected one of {', '.join(_DEVICES)}, got {name!r}")
    return _DEVICES[name]()
