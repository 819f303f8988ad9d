"""Where the drafters that hold a model compute, as the settings say."""

from __future__ import annotations

from typing import NamedTuple

import torch

from draft_service.drafters.base import DrafterError
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.devices import Device, get_device, resolve_dtype


class Compute(NamedTuple):
    """A device, its threads set, and the dtype of weights and activations."""

    device: Device
    dtype: torch.dtype


def configured_compute(settings: DraftSettings) -> Compute:
    """The device and the dtype of `draft.device` and `draft.dtype`.

    Raises:
        DrafterError: the device cannot be used here.
    """
    try:
        device = get_device(settings.device)
    except RuntimeError as error:
        raise DrafterError(f"draft.device: {error}") from error
    device.configure_threads(settings.threads)
    return Compute(device, resolve_dtype(settings.dtype, device))
