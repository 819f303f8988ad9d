"""Whether torch and transformers can be imported at all: an installed torch_npu without CANN prevents both."""

from __future__ import annotations

import importlib

from eagle_pangu.doctor.results import CheckFailedError, Result, run_check
from eagle_pangu.serving.torch_failures import explanation

MODULES = ("torch", "transformers")


def check_torch_import() -> Result:
    """Import both; every later check needs them."""
    return run_check("import torch", _import)


def _import() -> str:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            raise CheckFailedError(explanation(error) or f"import {name}: {error}") from error
    return f"{' and '.join(MODULES)} can be imported"
