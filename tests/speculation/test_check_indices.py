"""`check_indices`: the index guard in performance mode, where an index that nobody validated would be followed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_pangu.speculation.attention import blocked
from eagle_pangu.speculation.index_guard import IllegalIndexError
from tests.speculation.engines import bushy_tree, engine, prompt


@pytest.fixture(autouse=True)
def index_watch() -> None:
    """Off: here the engine's own guard is what refuses."""


def wrapping(table: torch.Tensor, dimension: int, index: torch.Tensor) -> torch.Tensor:
    """An attention that takes its last column by -1, as if nobody had said that this is no index."""
    wrapped = torch.where(index == index.max(), torch.full_like(index, -1), index)
    return table[(slice(None),) * dimension + (wrapped,)]


@pytest.mark.parametrize("checked", [False, True])
def test_a_negative_index_is_refused_before_the_operator_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Without it torch wraps the index, and nobody is told."""
    teacher = engine(tmp_path, mode="performance", numerics="bitwise", check_indices=checked)
    slot = teacher.open_slot()
    teacher.prefill(slot, prompt(9), want_logits=False)
    monkeypatch.setattr(blocked, "select", wrapping)
    if checked:
        with pytest.raises(IllegalIndexError, match=r"aten\.index\.Tensor: expected an index in \[0, 64\), got -1"):
            teacher.verify(slot, bushy_tree(6))
    else:
        assert teacher.verify(slot, bushy_tree(6)).logits is not None


def test_what_is_legal_has_the_same_bits_under_it(tmp_path: Path) -> None:
    logits = []
    for checked in (False, True):
        teacher = engine(tmp_path, mode="performance", numerics="bitwise", check_indices=checked)
        slot = teacher.open_slot()
        teacher.prefill(slot, prompt(9), want_logits=False)
        logits.append(teacher.verify(slot, bushy_tree(6)).logits)
    assert torch.equal(*logits)
