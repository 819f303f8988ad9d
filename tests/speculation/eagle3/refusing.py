"""Asking for a head that must not be had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from eagle_pangu.speculation.eagle3.formats import HeadError, load_head
from tests.speculation.eagle3.checkpoints import Layout, embeddings


def refusal(directory: Path, teachers: torch.Tensor | None = None) -> str:
    """The text with which the directory is refused; it names the directory."""
    with pytest.raises(HeadError, match=re.escape(str(directory))) as refused:
        load_head(directory, embeddings=teachers)
    return str(refused.value)


def refusal_of(layout: Layout, directory: Path) -> str:
    """As `refusal`, of that layout, with fitting embeddings."""
    return refusal(layout.write(directory), embeddings())
