"""Products that rows of a tree share after the whole blocks: the bits of products of their own, or not used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.invariance import tail_is_shared
from tests.speculation.engines import bushy_tree, engine, one_by_one, prompt

honest_bmm = torch.bmm


def split_bmm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """A library that sums every other column apart: columns of no weight between others change what is added when."""
    halves = honest_bmm(left[..., 0::2], right[:, 0::2]) + honest_bmm(left[..., 1::2], right[:, 1::2])
    return halves if out is None else out.copy_(halves)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("length", [5, 63, 120, 126])
def test_rows_keep_the_bits_of_their_paths_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool, length: int
) -> None:
    if shares and not tail_is_shared(2, 2, 16, 8, 17, get_device("cpu")):
        pytest.skip("this machine's products sum in another order")
    monkeypatch.setattr("eagle_pangu.speculation.engine.tail_is_shared", lambda *_: shares)
    target = engine(tmp_path, numerics="bitwise")
    ids, tree = prompt(length), bushy_tree(17, seed=length)
    slot = target.open_slot()
    target.prefill(slot, ids, want_logits=False)
    logits = target.verify(slot, tree).logits
    assert logits is not None
    for row in range(tree.rows):
        assert torch.equal(logits[row], one_by_one(target, ids, tree, row)), f"row {row}"


def test_the_probe_notices_a_library_that_does_not_sum_columns_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "bmm", split_bmm)
    assert not tail_is_shared(3, 3, 64, 4, 17, get_device("cpu"))
