"""Whether torch and transformers can be imported at all: an installed torch_npu that cannot be loaded prevents both."""

from __future__ import annotations

import importlib

from eagle_pangu.doctor.results import CheckFailedError, Result, run_check
from eagle_pangu.serving.torch_failures import explanation

MODULES = ("torch", "transformers", "eagle_pangu.doctor.on_device")
"""The last holds the later checks: transformers imports torch_npu late, with its first model class."""


def check_torch_import() -> Result:
    """Import all that the later checks need."""
    return run_check("import torch", _import)


def _import() -> str:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise CheckFailedError(explanation(error) or f"import {name}: {type(error).__name__}: {error}") from error
    return "torch and transformers can be imported"
