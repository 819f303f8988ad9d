"""The branchable cache alone: what moves, what does not, and what is refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from eagle_pangu.speculation.cache import CacheShape, Slot

SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


def write(slot: Slot, rows: int, first_row: int = 0, base: float = 0.0) -> None:
    """Write rows whose K holds base + row number, and whose V holds the negative of it."""
    slot.begin(first_row, rows)
    numbers = torch.arange(first_row, rows, dtype=torch.float32) + base
    states = numbers[None, None, :, None].expand(1, SHAPE.kv_heads, -1, SHAPE.head_dim)
    for layer in range(SHAPE.layers):
        slot.write(layer, states, -states)


def keys(slot: Slot) -> list[float]:
    written = slice(0, slot.committed_length)
    assert torch.equal(slot._main.keys[:, :, written], -slot._main.values[:, :, written])
    return slot._main.keys[1, 1, : slot.committed_length, 0].tolist()


@pytest.mark.parametrize("branch", ["shared", "replicate"])
@pytest.mark.parametrize("path", [[], [1], [1, 2], [2], [2, 3], [1, 3], [4]])
def test_commit_gathers_the_accepted_path_behind_the_root(branch: str, path: list[int]) -> None:
    slot = Slot(SHAPE, 64, branch)
    write(slot, 3, base=100)
    slot.commit_all()
    write(slot, 5, base=200)
    slot.commit(path)
    assert keys(slot) == [100, 101, 102, 200, *(200 + row for row in path)]
    assert slot.branch_rows == 0


def test_a_replicated_branch_never_touches_the_main_cache_before_commit() -> None:
    slot = Slot(SHAPE, 64, "replicate")
    write(slot, 3, base=100)
    slot.commit_all()
    slot._main.keys[:, :, 3:] = -1
    before = slot._main.keys.clone()
    write(slot, 5, base=200)
    assert torch.equal(slot._main.keys, before)


def test_a_dense_path_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(SHAPE, 64)
    write(slot, 5)
    monkeypatch.setattr(slot, "_gather", lambda *args: pytest.fail("moved KV for a dense path"))
    slot.commit([1, 2, 3])
    assert slot.committed_length == 4


@pytest.mark.parametrize("rows", [[0], [5], [1, 9], [-1]])
def test_rows_outside_the_branch_cannot_be_committed(rows: list[int]) -> None:
    slot = Slot(SHAPE, 64)
    write(slot, 5)
    with pytest.raises(ValueError, match="expected rows in"):
        slot.commit(rows)
    assert slot.committed_length == 0


def test_the_kv_is_freed_with_the_slot_and_waits_for_no_collector() -> None:
    slot = Slot(SHAPE, 64)
    storage = weakref.ref(slot._main)
    gc.disable()
    try:
        del slot
        assert storage() is None
    finally:
        gc.enable()


def test_commit_without_a_branch_is_refused() -> None:
    with pytest.raises(ValueError, match="no branch"):
        Slot(SHAPE, 64).commit([])


def test_truncate_forgets_committed_tokens_only_within_the_slot() -> None:
    slot = Slot(SHAPE, 64)
    write(slot, 6)
    slot.commit_all()
    slot.truncate(2)
    assert keys(slot) == [0, 1]
    with pytest.raises(ValueError, match="expected a length"):
        slot.truncate(3)


def test_growth_must_continue_the_branch() -> None:
    slot = Slot(SHAPE, 64)
    write(slot, 2)
    with pytest.raises(ValueError, match="does not continue"):
        slot.begin(3, 4)


def committed(*numbers: float, branch: str = "shared") -> Slot:
    """A slot whose committed columns hold these numbers; whatever lies behind them is NaN."""
    slot = Slot(SHAPE, 64, branch)
    slot._main.keys.fill_(float("nan"))
    slot._main.values.fill_(float("nan"))
    for number in numbers:
        write(slot, 1, base=number)
        slot.commit_all()
    return slot


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("branch", ["shared", "replicate"])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_slot_adopts_committed_columns_and_touches_no_other(kept: bool, branch: str, length: int) -> None:
    source = committed(5, 6, 7, branch=branch)
    write(source, 2, base=8)  # a branch, which is nobody's yet
    slot = committed(branch=branch)
    slot.adopt(source.keep() if kept else source, length)
    assert keys(slot) == [5, 6, 7][:length]
    for tensor in (slot._main.keys, slot._main.values):
        assert torch.isnan(tensor[:, :, length:]).all()
    write(slot, 3, base=20)
    slot.commit([2])
    assert keys(slot) == [*[5, 6, 7][:length], 20, 22]
    assert keys(source) == [5, 6, 7]


def test_what_is_kept_of_a_slot_is_its_committed_columns_and_outlives_it() -> None:
    source = committed(5, 6, 7)
    kept = source.keep()
    storage = weakref.ref(source._main)
    assert kept._main.keys.shape[2] == kept.committed_length == 3
    source._main.keys.zero_()
    del source
    assert storage() is None
    slot = committed()
    slot.adopt(kept, 3)
    assert keys(slot) == [5, 6, 7]


def test_only_an_empty_slot_adopts_and_only_what_there_is() -> None:
    source = committed(5, 6, 7)
    for length in (-1, 4):
        with pytest.raises(ValueError, match=r"expected a length in \[0, 3\]"):
            committed().adopt(source, length)
    with pytest.raises(ValueError, match="expected an empty slot"):
        committed(1).adopt(source, 2)
    branching = committed()
    write(branching, 1)
    with pytest.raises(ValueError, match="expected an empty slot"):
        branching.adopt(source, 2)
    with pytest.raises(ValueError, match="expected a source of"):
        Slot(SHAPE._replace(layers=1), 64).adopt(source, 2)
    long = Slot(SHAPE, 128)
    write(long, 65)
    long.commit_all()
    with pytest.raises(ValueError, match=r"expected a length in \[0, 64\]"):
        committed().adopt(long, 65)
