"""Static shapes: rows and slots rounded up to few sizes, on a CPU that is told to; nothing changes but the shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.attention.kernels import over_slot
from eagle_pangu.speculation.buckets import Buckets, SeenShapes
from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices.base import Attention, HeadShape
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.plan import ForwardPlan
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree
from eagle_pangu.speculation.warm_up import warm_up
from tests.models import tiny_llama
from tests.speculation.engines import NUMERICS, BucketedCpu, bushy_tree, engine, prompt
from tests.speculation.test_batches import assert_same, segments


def bucketed(directory: Path, **options: Any) -> Engine:
    device = BucketedCpu()
    checkpoint = load_checkpoint(directory / "llama", torch.float32, device)
    return Engine(checkpoint, device, **{"slot_capacity": 512, **options})


@pytest.fixture
def models(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "llama")
    return tmp_path


@given(st.integers(1, 300), st.integers(1, 5000), st.data())
def test_a_bucket_holds_what_it_is_asked_for_and_wastes_less_than_half(
    rows: int, capacity: int, data: st.DataObject
) -> None:
    buckets = Buckets.up_to(rows, capacity)
    asked = data.draw(st.integers(1, rows))
    assert asked <= buckets.rows_for(asked) < 2 * asked + 1
    assert buckets.rows_for(asked) in buckets.rows
    columns = data.draw(st.integers(1, capacity))
    assert buckets.length_for(columns) >= columns
    assert buckets.length_for(columns) % 64 == 0
    assert list(buckets.lengths) == sorted(set(buckets.lengths))
    assert list(buckets.rows) == sorted(set(buckets.rows))
    assert list(map(buckets.rows_for, buckets.fewest)) == list(buckets.rows)
    assert [buckets.rows_for(rows - 1) for rows in buckets.fewest[1:]] == list(buckets.rows[:-1])


def test_more_rows_than_the_largest_bucket_are_a_multiple_of_it_and_more_columns_an_error() -> None:
    buckets = Buckets.up_to(20, 600)
    assert buckets == Buckets((1, 2, 4, 8, 16, 32), (256, 512, 640))
    assert buckets.rows_for(33) == 64
    with pytest.raises(ValueError, match="at most 640 columns, got 641"):
        buckets.length_for(641)


@pytest.mark.parametrize("branch", ["shared", "replicate"])
@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
def test_results_are_those_of_exact_shapes(models: Path, mode: str, numerics: str, branch: str) -> None:
    exact = engine(models, mode=mode, numerics=numerics)
    rounded = bucketed(models, mode=mode, numerics=numerics, branch=branch)
    expected = exact.run(segments(exact))
    for ours, theirs in zip(rounded.run(segments(rounded)), expected, strict=True):
        assert_same(ours, theirs, bits=numerics == "bitwise")


@pytest.mark.parametrize("numerics", ["bitwise", "free"])
def test_a_tree_grown_level_by_level_is_that_of_exact_shapes(models: Path, numerics: str) -> None:
    logits = []
    for target in (engine(models, numerics=numerics), bucketed(models, numerics=numerics)):
        slot, tree = target.open_slot(), bushy_tree(13, seed=3)
        target.prefill(slot, prompt(70), want_logits=False)
        for start, end in ((0, 1), (1, 6), (6, 13)):
            part = TokenTree(tree.token_ids[:end], tree.parents[:end])
            [result] = target.run([Segment(slot, part, first_row=start, logits_from=start)])
        target.commit(slot, [1, 4])
        assert slot.committed_length == 73
        logits += [result.logits, target.verify(slot, bushy_tree(5)).logits]
    exact, rounded = logits[:2], logits[2:]
    for ours, theirs in zip(rounded, exact, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=0 if numerics == "bitwise" else 1e-3, atol=0 if numerics == "bitwise" else 1e-4
        )


def test_padding_is_written_behind_the_capacity_and_rejected_rows_reach_nobody(models: Path) -> None:
    target = bucketed(models, numerics="free")
    slot = target.open_slot(256)
    target.prefill(slot, prompt(243), want_logits=False)
    expected = target.verify(slot, bushy_tree(13)).logits  # fills the slot to its last column; 3 rows of padding
    assert expected is not None
    assert expected.shape[0] == 13
    assert slot.written == slot.capacity == 256
    target.abort(slot)
    for layer in range(4):
        for table in slot.columns(layer):
            table[:, :, 243:256] = float("nan")
            table[:, :, 256:] = float("nan")
    again = target.verify(slot, bushy_tree(13)).logits
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_the_last_columns_of_a_slot_take_a_chunk_whose_bucket_is_longer_than_what_is_left(models: Path) -> None:
    target = bucketed(models, numerics="free")
    slot = target.open_slot(256)
    target.prefill(slot, prompt(255), want_logits=False)
    assert target.prefill(slot, prompt(1, seed=1), want_logits=True).logits is not None
    assert slot.committed_length == 256
    with pytest.raises(ValueError, match="exceed 256 columns"):
        target.prefill(slot, prompt(1), want_logits=False)


class WholeSlotsCpu(BucketedCpu):
    """Reads slots whole, as a fused operator does; keeps the shapes that it was really called with."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[tuple[Any, ...]] = set()

    def attention(self, name: str, heads: HeadShape) -> Attention:
        def over_whole_slot(query: Any, key: Any, value: Any, plan: ForwardPlan, scale: float) -> torch.Tensor:
            self.called.add((tuple(query.shape), tuple(key.shape), plan.is_chain and not plan.padding))
            return over_slot(eager_attention)(query, key, value, plan, scale)

        return Attention("whole", "", over_whole_slot, eager_attention, whole_slots=True)


def warmed_up(directory: Path, device: WholeSlotsCpu, **options: Any) -> tuple[Engine, SeenShapes]:
    checkpoint = load_checkpoint(directory / "llama", torch.float32, device)
    target = Engine(checkpoint, device, numerics="free", **options)
    warm_up(target)
    assert target.shapes is not None
    return target, target.shapes


def test_serving_meets_no_shape_that_the_warm_up_has_not_run(models: Path) -> None:
    device = WholeSlotsCpu()
    target, shapes = warmed_up(models, device, chunk=32, max_rows=16, slot_capacity=400)
    warmed, called = shapes.warmed, device.called.copy()
    # Rows 1 to 64 in seven sizes, as many of logits; chains and trees of 1 to 32 over slots of 256 and 448 columns.
    assert warmed == 7 + 7 + 2 * 2 * 6
    random = np.random.default_rng(0)
    for turn in range(30):
        slots = [target.open_slot(int(random.integers(40, 400))) for _ in range(int(random.integers(1, 3)))]
        target.run([known_tokens(slot, prompt(1 + turn % 16, seed=turn), want_logits=turn % 2 == 0) for slot in slots])
        target.run([Segment(slot, bushy_tree(int(random.integers(1, 15)), seed=turn)) for slot in slots])
    assert (shapes.warmed, shapes.met_later) == (warmed, 0)
    assert device.called == called
    target.prefill(target.open_slot(), prompt(60), want_logits=False)  # more than a chunk
    assert shapes.met_later > 0


@pytest.fixture(scope="module")
def of_default_settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, WholeSlotsCpu]:
    """As the teacher's settings are when nobody changes them, but for the longest slot."""
    directory, device = tmp_path_factory.mktemp("models"), WholeSlotsCpu()
    tiny_llama(directory / "llama", num_hidden_layers=1)
    settings = {"chunk": 256, "step_rows": 256, "max_rows": 64, "slot_capacity": 512}
    return warmed_up(directory, device, **settings)[0], device


@pytest.mark.parametrize(
    ("trees", "prompts", "capacity"),
    [
        pytest.param((), (129,), 250, id="a prompt of the last bucket in the shortest slot"),
        pytest.param((), (256,), 256, id="a prompt that fills the shortest slot"),
        pytest.param((), (256,), 512, id="a whole chunk"),
        pytest.param((65,), (), 250, id="the largest tree in the shortest slot"),
        pytest.param((65, 65, 65), (), 300, id="trees whose buckets come to more than a step"),
        pytest.param((17,) * 15, (), 200, id="many trees a row past a bucket"),
        pytest.param((9,) * 28, (), 200, id="more trees yet"),
        pytest.param((1,) * 256, (), 64, id="as many sessions as a step has rows"),
        pytest.param((65,), (190,), 500, id="a tree beside a chunk"),
        pytest.param((65, 65, 33), (65,), 300, id="trees beside the beginning of a prompt"),
    ],
)
def test_default_settings_serve_no_shape_that_was_not_warmed(
    of_default_settings: tuple[Engine, WholeSlotsCpu], trees: tuple[int, ...], prompts: tuple[int, ...], capacity: int
) -> None:
    target, device = of_default_settings
    assert target.shapes is not None
    met, called = target.shapes.met_later, device.called.copy()
    segments = []
    for rows in trees:
        slot = target.open_slot(capacity)
        target.prefill(slot, prompt(20), want_logits=False)
        segments.append(Segment(slot, bushy_tree(rows)))
    for every_row in (False, True) if not trees else (True,):
        read = [
            known_tokens(target.open_slot(capacity), prompt(rows), want_logits=True, every_row=every_row)
            for rows in prompts
        ]
        if segments or read:
            target.run([*segments, *read])
    assert target.shapes.met_later == met
    assert device.called == called


def test_an_attention_that_cuts_slots_has_a_shape_for_every_length(models: Path) -> None:
    target = bucketed(models, numerics="free", chunk=32, max_rows=16)
    assert target.attention is not None
    assert not target.attention.whole_slots
    warm_up(target)
    assert target.shapes is not None
    slot = target.open_slot()
    target.prefill(slot, prompt(20), want_logits=True)
    met = target.shapes.met_later
    for turn in range(10):
        target.verify(slot, bushy_tree(9, seed=turn))
        target.commit(slot, [])
    assert target.shapes.met_later == met + 10


def test_the_device_is_told_of_the_longest_slot_with_its_spare_columns(models: Path) -> None:
    asked: list[HeadShape] = []

    class Asking(WholeSlotsCpu):
        def attention(self, name: str, heads: HeadShape) -> Attention:
            asked.append(heads)
            return super().attention(name, heads)

    device = Asking()
    checkpoint = load_checkpoint(models / "llama", torch.float32, device)
    target = Engine(checkpoint, device, slot_capacity=300, numerics="free")
    assert [heads.slot_columns for heads in asked] == [320 + 64]
    assert target.open_slot().columns(0)[0].shape[2] == 320 + 64


def test_sessions_share_a_pass_as_far_as_the_last_bucket_holds_them() -> None:
    buckets = Buckets.up_to(64, 256)
    assert buckets.together([9, 9, 9, 9, 1]) == 4  # each is rounded up to 16
    assert buckets.together([8] * 8) == 8
    assert buckets.together([8] * 9) == 8
    assert buckets.together([100, 1]) == 1
    assert buckets.together([1]) == 1


def test_a_shape_counts_once() -> None:
    shapes = SeenShapes()
    shapes.note("rows", 1)
    shapes.note("rows", 1)
    shapes.note("logits", 1)
    shapes.end_warm_up()
    shapes.note("rows", 1)
    assert (shapes.warmed, shapes.met_later) == (2, 0)
    shapes.note("rows", 2)
    shapes.note("rows", 2)
    assert (shapes.warmed, shapes.met_later) == (2, 1)


def test_a_device_without_static_shapes_pads_nothing(models: Path) -> None:
    target = engine(models)
    assert target.shapes is target.buckets is None
    assert target.spare_columns == 0
    assert target.open_slot(65).capacity == target.slot_columns(65) == 128
    slot = target.open_slot(65)
    assert slot.columns(0)[0].shape[2] == 128
    assert Segment(slot, bushy_tree(5)).plan(2, target.buckets).rows == 5
