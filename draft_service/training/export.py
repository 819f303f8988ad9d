"""Stage 5: the trained head as a directory that others can load, the model card beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from draft_service.training.stages import write_text
from eagle_pangu.speculation.eagle3.formats import save_head
from eagle_pangu.speculation.eagle3.head import Eagle3Head


def export(head: Eagle3Head, directory: Path, card: str) -> None:
    """Write head and card; the directory appears, or is replaced, when it is complete."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_head(head, partial, torch_dtype=torch.bfloat16)
    write_text(partial / "README.md", card)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
