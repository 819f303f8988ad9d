"""Claims the device for this process, before anything that asks which devices there are is imported. See `device`."""

from __future__ import annotations

import sys

from tests.simulated_npu import device, operators

device.register()
sys.modules["torch_npu"] = operators

from tests.index_watch import index_watch  # noqa: E402 -- it imports transformers, which looks for torch_npu

__all__ = ["index_watch"]
