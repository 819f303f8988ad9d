"""The rectangle of a batch: what moves, what does not, whom it forgets, and that falling out of step is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.cache import CacheShape, Slot
from eagle_pangu.speculation.devices.sdpa import sdpa
from eagle_pangu.speculation.layouts.rectangle import Rectangle, SynchronisationError
from eagle_pangu.speculation.layouts.rectangular import RectangularLayout, check_positions
from eagle_pangu.speculation.plan import ForwardPlan
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree
from tests.speculation.engines import bushy_tree, engine, prompt

CPU = torch.device("cpu")
SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, device=CPU)


def grow(slot: Slot, rows: int, path: list[int] | None = None) -> None:
    """A pass that writes random rows into the slot alone, and a commit."""
    slot.begin(0, rows)
    for layer in range(SHAPE.layers):
        slot.write(layer, *torch.randn(2, 1, SHAPE.kv_heads, rows, SHAPE.head_dim))
    slot.commit(range(1, rows) if path is None else path)


def filled(length: int) -> Slot:
    slot = Slot(SHAPE, 256)
    grow(slot, length)
    return slot


def check(rectangle: Rectangle, slots: list[Slot]) -> None:
    """Every row is the slot's tokens behind zeros, whatever path led there."""
    assert rectangle.end == max(slot.committed_length for slot in slots)
    assert sorted(rectangle.rows) == list(range(len(slots)))
    rectangle.check_content(slots)
    for slot, row, pad in zip(slots, rectangle.rows, rectangle.pads, strict=True):
        assert pad == rectangle.end - slot.committed_length
        for table, own in ((rectangle._keys, slot._main.keys), (rectangle._values, slot._main.values)):
            assert torch.equal(table[:, row, :, pad : rectangle.end], own[:, :, : slot.committed_length])
            assert not table[:, row, :, :pad].any()


def plans(slots: list[Slot], trees: list[TokenTree]) -> list[ForwardPlan]:
    return [ForwardPlan(tree, slot.committed_length, 0, 2, CPU) for slot, tree in zip(slots, trees, strict=True)]


def test_rows_are_padded_on_the_left_to_the_longest() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(3), filled(9), filled(1)]
    assert rectangle.align(slots, 4) == 13
    assert rectangle.pads == [6, 0, 8]
    check(rectangle, slots)


def test_who_accepts_as_much_as_the_longest_is_not_shifted_and_others_are() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(3), filled(9), filled(5)]
    rectangle.align(slots, 6)
    for slot, accepted in zip(slots, (2, 2, 1), strict=True):
        grow(slot, 6, [1, 3, 5][:accepted])
    assert rectangle.align(slots, 6) == 3 + 3 + (5 + 2)
    check(rectangle, slots)


def test_a_pass_without_commits_moves_nothing() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(3), filled(9)]
    rectangle.align(slots, 6)
    assert rectangle.align(slots, 6) == 0
    assert rectangle.align(slots[::-1], 6) == 0  # rows stay with their sessions, in any order
    check(rectangle, slots[::-1])


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_commits_joins_and_leaves_keeps_every_row_whole(seed: int) -> None:
    random = np.random.default_rng(seed)
    rectangle, slots = Rectangle(SHAPE), []
    for _ in range(60):
        slots = [slot for slot in slots if random.random() < 0.9 and slot.committed_length < 200]
        slots += [filled(int(random.integers(1, 60))) for _ in range(int(random.integers(0, 3)))][: 6 - len(slots)]
        slots = slots or [filled(2)]
        random.shuffle(slots)
        rectangle.align(slots, int(random.integers(1, 9)))
        check(rectangle, slots)
        for slot in slots:
            grow(slot, 9, sorted(random.permutation(np.arange(1, 9))[: random.integers(0, 5)].tolist()))


def test_what_a_slot_committed_in_another_pass_is_taken_over() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(3), filled(9)]
    rectangle.align(slots, 6)
    grow(slots[0], 5)
    grow(slots[0], 4, [2])
    rectangle.align(slots, 6)
    check(rectangle, slots)


def test_a_slot_that_was_cut_is_copied_anew() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(7), filled(9)]
    rectangle.align(slots, 6)
    slots[0].truncate(2)
    grow(slots[0], 3)
    assert rectangle.align(slots, 6) == 5
    check(rectangle, slots)


def test_nan_of_a_session_that_left_does_not_reach_its_successor() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(20), filled(30)]
    slots[0]._main.keys[:], slots[0]._main.values[:] = float("nan"), float("nan")
    rectangle.align(slots, 3)
    slots[0] = filled(4)
    rectangle.align(slots, 3)
    check(rectangle, slots)


def test_it_keeps_no_slot_alive() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(3), filled(5)]
    rectangle.align(slots, 2)
    RectangularLayout(rectangle, plans(slots, [bushy_tree(2)] * 2), eager_attention)
    gone = weakref.ref(slots.pop())
    gc.collect()
    assert gone() is None
    rectangle.align(slots, 2)
    check(rectangle, slots)


def test_a_move_that_fails_leaves_nothing_that_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(3), filled(9), filled(5)]
    rectangle.align(slots, 6)
    for slot, rows in zip(slots, (2, 4, 3), strict=True):
        grow(slot, rows)
    whole = rectangle._append

    def failing(row: int, slot: Slot, *rest: int) -> None:
        if slot is slots[2]:
            raise MemoryError
        whole(row, slot, *rest)

    monkeypatch.setattr(rectangle, "_append", failing)
    with pytest.raises(MemoryError):
        rectangle.align(slots, 6)
    monkeypatch.undo()
    rectangle.align(slots, 6)
    check(rectangle, slots)


def test_padded_rows_are_the_root_again_and_nobody_sees_them() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(3), filled(5)]
    trees = [TokenTree.build([7, 8], [0, 0]), TokenTree.build([1, 2, 3, 4], [0, 0, 1, 0])]
    rectangle.align(slots, 4)
    layout = RectangularLayout(rectangle, plans(slots, trees), eager_attention)
    assert layout.first_rows == [0, 4]
    assert layout.input_ids.tolist() == [[7, 8, 7, 7], [1, 2, 3, 4]]
    assert layout.position_ids.tolist() == [[3, 4, 3, 3], [5, 6, 7, 6]]
    seen = layout._keep.view(2, SHAPE.kv_heads, 2, 4, 9)
    assert (seen == seen[:, :1, :1]).all()  # every head and query head alike
    prefixes = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    branches = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]], trees[1].mask.tolist()]).bool()
    assert torch.equal(seen[:, 0, 0, :, :5], prefixes[:, None].expand(2, 4, 5))
    assert torch.equal(seen[:, 0, 0, :, 5:], branches)


def break_alignment(rectangle: Rectangle) -> None:
    """As if no row had been shifted after the longest one accepted a token more."""
    rectangle.end += 1


def break_padding(rectangle: Rectangle) -> None:
    _, member = rectangle._members
    rectangle._members[1] = type(member)(member.slot, member.pad - 1, member.length)


def break_length(rectangle: Rectangle) -> None:
    _, member = rectangle._members
    rectangle._members[1] = type(member)(member.slot, member.pad + 1, member.length - 1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (break_alignment, "session row 0: padding 0 \\+ content 5 is not the 6 of all rows"),
        (break_padding, "session row 1: padding 1 \\+ content 3 is not the 5 of all rows"),
        (break_length, "session row 1: expected 3 committed tokens, got 2"),
    ],
)
def test_rows_that_do_not_align_are_noticed(fault: Callable[[Rectangle], None], message: str) -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(5), filled(3)]
    rectangle.align(slots, 2)
    fault(rectangle)
    with pytest.raises(SynchronisationError, match=message):
        RectangularLayout(rectangle, plans(slots, [bushy_tree(2)] * 2), eager_attention)


def test_positions_counted_from_the_padded_length_are_noticed() -> None:
    slots, trees = [filled(5), filled(3)], [bushy_tree(2), bushy_tree(2)]
    with pytest.raises(SynchronisationError, match=r"session row 1: expected position ids \[3, 4\], got \[5, 6\]"):
        check_positions(np.array([[5, 6], [5, 6]]), plans(slots, trees))


def test_a_row_that_sees_more_than_its_path_is_noticed_before_the_pass() -> None:
    """Its position is how many it sees, so the layout's own check finds it."""
    rectangle, slots = Rectangle(SHAPE), [filled(5), filled(3)]
    trees = [bushy_tree(2), TokenTree.build([1, 2, 3], [0, 0, 0])]
    rectangle.align(slots, 3)
    trees[1].mask[2, 1] = True  # its sibling
    with pytest.raises(
        SynchronisationError, match=r"session row 1: expected position ids \[3, 4, 4\], got \[3, 4, 5\]"
    ):
        RectangularLayout(rectangle, plans(slots, trees), eager_attention)


def test_a_row_that_was_not_shifted_is_noticed_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(5), filled(3)]
    rectangle.align(slots, 4)
    grow(slots[0], 4)
    grow(slots[1], 4, [])
    monkeypatch.setattr(rectangle, "_realign", lambda *args: 0)
    rectangle.align(slots, 4)
    with pytest.raises(SynchronisationError, match="session row 0: its KV is not that of its slot"):
        rectangle.check_content(slots)


def test_the_fused_kernel_takes_the_rectangle_as_it_is() -> None:
    rectangle, slots = Rectangle(SHAPE), [filled(3), filled(5)]
    rectangle.align(slots, 4)
    layout = RectangularLayout(rectangle, plans(slots, [bushy_tree(2), bushy_tree(4)]), sdpa)
    query, states = torch.randn(2, 4, 4, 4), torch.randn(2, 2, 4, 4)
    for slot, rows in zip(slots, (2, 4), strict=True):
        slot.begin(0, rows)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):  # raises where torch would go on with an unfused one
        assert layout.attend(0, query, *rectangle.update(states, states, 0), 0.5).shape == (2, 4, 4, 4)


def test_part_of_a_tree_is_refused() -> None:
    rectangle, slot = Rectangle(SHAPE), filled(5)
    rectangle.align([slot], 4)
    with pytest.raises(ValueError, match="whole trees"):
        RectangularLayout(rectangle, [ForwardPlan(bushy_tree(4), 5, 1, 2, CPU)], eager_attention)


@pytest.mark.parametrize("mode", ["performance", "reference"])
@pytest.mark.parametrize("architecture", ["llama", "llama-bias", "qwen3"])
def test_a_rectangular_pass_gives_the_logits_features_and_kv_of_separate_ones(
    tmp_path: Path, mode: str, architecture: str
) -> None:
    target = engine(tmp_path, architecture, mode=mode, numerics="free")
    trees = [TokenTree.root_only(3), bushy_tree(11, seed=1), bushy_tree(6, seed=2, reach=1)]
    together, alone = ([target.open_slot() for _ in trees] for _ in range(2))
    for slots in (together, alone):
        for index, slot in enumerate(slots):
            target.prefill(slot, prompt(1 + 35 * index, index), want_logits=False)
    rectangle = Rectangle(target.cache_shape)
    rectangle.align(together, 11)
    assert target.attention is not None
    attention = target.attention.masked
    results = target.run(
        [Segment(slot, tree, want_features=tree.rows > 1) for slot, tree in zip(together, trees, strict=True)],
        lambda _, its_plans: RectangularLayout(rectangle, its_plans, attention),
    )
    for result, slot, own, tree in zip(results, together, alone, trees, strict=True):
        expected = target.verify(own, tree, want_features=True)
        torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=1e-4)
        for table, other in ((slot._main.keys, own._main.keys), (slot._main.values, own._main.values)):
            torch.testing.assert_close(table[:, :, : slot.written], other[:, :, : slot.written], atol=1e-4, rtol=1e-4)
        if tree.rows > 1:
            torch.testing.assert_close(result.features, expected.features, atol=2e-2, rtol=2e-2)
        else:
            assert result.features is None
