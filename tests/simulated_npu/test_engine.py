"""An engine on the simulated npu: every attention, bits, buckets, what is left over in memory, and bad indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.devices.base import AttentionError
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.index_guard import IllegalIndexError
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.warm_up import warm_up
from tests.index_watch import IndexWatch
from tests.simulated_npu import operators
from tests.simulated_npu.systems import CHUNK, FUSED, Compute, engine_on
from tests.speculation.engines import bushy_tree, one_by_one, prompt

ATTENTIONS = {
    FUSED: "bfloat16",
    "npu_fused_infer_attention_score": "float16",
    "npu_fusion_attention": "float32",
    "sdpa": "bfloat16",
    "eager": "float32",
}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
PROMPT = prompt(2 * CHUNK + 5)
TREE = bushy_tree(11, seed=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def read(engine: Engine, slot: Slot, ids: Any = PROMPT) -> torch.Tensor:
    """[vocab] logits after a prompt, read in chunks."""
    for start in range(0, len(ids), CHUNK):
        logits = engine.prefill(slot, ids[start : start + CHUNK], want_logits=True).logits
    assert logits is not None
    return logits[-1].cpu()


def verified(engine: Engine, slot: Slot, tree: Any = TREE) -> torch.Tensor:
    """[rows, vocab] logits of a tree."""
    logits = engine.verify(slot, tree).logits
    assert logits is not None
    return logits.cpu()


def poison(slot: Slot, value: float) -> None:
    """What is not committed, the spare columns included, holds that value in every layer, V and K."""
    for table in (slot._main.keys, slot._main.values):
        table[:, :, slot.committed_length :] = value


@pytest.mark.parametrize("architecture", ["llama", "llama-bias"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_gives_the_logits_of_the_host(directory: Path, attention: str, architecture: str) -> None:
    dtype = ATTENTIONS[attention]
    compute = Compute(architecture, "performance", "free", dtype, attention)
    host = engine_on("cpu", directory, compute._replace(attention="auto"))
    npu = engine_on("npu", directory, compute)
    before = operators.calls.copy()
    slots = host.open_slot(), npu.open_slot()
    after_prompt = [read(engine, slot) for engine, slot in zip((host, npu), slots, strict=True)]
    together = [verified(engine, slot) for engine, slot in zip((host, npu), slots, strict=True)]
    for ours, theirs in (after_prompt, together):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=TOLERANCE[dtype], rtol=0)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    # Three chunks and a tree, in each of two layers.
    assert operators.calls - before == ({attention: 2 * (3 + 1)} if attention.startswith("npu") else {})


@pytest.mark.parametrize("attention", ["auto", "npu_fused_infer_attention_score"])
def test_float32_has_no_fused_operator_and_says_so(directory: Path, attention: str) -> None:
    compute = Compute("llama", "performance", "free", "float32", attention)
    if attention != "auto":
        with pytest.raises(AttentionError, match=r"expected dtype float16 or bfloat16, got float32"):
            engine_on("npu", directory, compute)
        return
    numerics = engine_on("npu", directory, compute).numerics
    assert numerics.attention == "eager"
    assert "expected dtype float16 or bfloat16, got float32" in numerics.attention_fallback_reason


@pytest.mark.parametrize(("architecture", "dtype"), [("llama", "float32"), ("llama-bias", "bfloat16")])
def test_bitwise_rows_of_a_tree_are_those_of_one_by_one_decoding(
    directory: Path, architecture: str, dtype: str
) -> None:
    engine = engine_on("npu", directory, Compute(architecture, "performance", "bitwise", dtype))
    slot = engine.open_slot()
    read(engine, slot)
    logits = verified(engine, slot)
    for row in (0, 3, 7, TREE.rows - 1):
        assert torch.equal(logits[row], one_by_one(engine, PROMPT, TREE, row).cpu()), f"row {row}"


def test_bitwise_bits_do_not_depend_on_chunks_or_company(directory: Path) -> None:
    engine = engine_on("npu", directory, Compute("llama-bias", "performance", "bitwise", "float32"))
    slot, other, third = (engine.open_slot() for _ in range(3))
    alone = read(engine, slot)
    for start in range(0, len(PROMPT), 7):
        chunk = engine.run(
            [
                known_tokens(third, prompt(3, seed=start), want_logits=True),
                known_tokens(other, PROMPT[start : start + 7], want_logits=True),
            ]
        )[1]
    assert chunk.logits is not None
    assert torch.equal(chunk.logits[-1].cpu(), alone)
    tree = verified(engine, slot)
    beside = engine.run([Segment(third, bushy_tree(5)), Segment(other, TREE)])[1].logits
    assert beside is not None
    assert torch.equal(beside.cpu(), tree)


@pytest.mark.parametrize(
    ("compute", "value"),
    [
        (Compute("llama", "performance", "free", "bfloat16"), float("nan")),
        (Compute("llama", "performance", "free", "bfloat16"), 1e30),
        (Compute("llama", "performance", "free", "float32", "npu_fusion_attention"), float("nan")),
        (Compute("llama", "performance", "bitwise", "float32"), 1e30),
        (Compute("llama", "performance", "bitwise", "float32"), float("nan")),
        (Compute("llama", "reference", "free", "float32"), float("nan")),
    ],
)
def test_what_rejected_rows_leave_behind_moves_no_bit(directory: Path, compute: Compute, value: float) -> None:
    """Each pass after the poison is one of the same shapes as without it."""
    engine = engine_on("npu", directory, compute)
    logits = []
    for spoil in (False, True):
        slot = engine.open_slot()
        passes = []
        for tree, path in ((TREE, [1, 2]), (bushy_tree(6, seed=4), []), (bushy_tree(9, seed=5), [1])):
            if slot.committed_length == 0:
                passes.append(read(engine, slot))
            if spoil:
                poison(slot, value)
            passes.append(verified(engine, slot, tree))
            row_path = [row for row in path if row < tree.rows]
            engine.commit(slot, _a_path(tree, len(row_path)))
        logits.append(torch.cat([each.reshape(-1, each.shape[-1]) for each in passes]))
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(*logits)


def _a_path(tree: Any, length: int) -> list[int]:
    """Rows from the root's first child down."""
    rows: list[int] = []
    for _ in range(length):
        below = list(tree.children[rows[-1] if rows else 0].values())
        if not below:
            break
        rows.append(below[-1])
    return rows


def test_the_shapes_that_serving_meets_are_those_of_the_warm_up(directory: Path) -> None:
    engine = engine_on("npu", directory, Compute("llama", "performance", "free", "bfloat16"))
    warm_up(engine)
    assert engine.shapes is not None
    warmed = engine.shapes.warmed
    assert warmed > 0
    slots = [engine.open_slot(capacity) for capacity in (20, 60, 128)]
    for slot, length in zip(slots, (5, 17, 37), strict=True):
        read(engine, slot, prompt(length))
    for rows in range(1, 12):
        engine.run([Segment(slot, bushy_tree(rows, seed=rows)) for slot in slots[: 1 + rows % 2]])
    assert (engine.shapes.warmed, engine.shapes.met_later) == (warmed, 0)


def test_a_bad_index_is_refused_before_the_operator_in_performance_mode(
    directory: Path, index_watch: IndexWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `check_indices` alone: the watch of the tests is off."""
    index_watch.active = False
    compute = Compute("llama", "performance", "free", "bfloat16")
    guarded = engine_on("npu", directory, compute, check_indices=True)
    slot = guarded.open_slot()
    read(guarded, slot)
    before = operators.calls.total()
    bad = np.array([3, -1])
    with pytest.raises(IllegalIndexError, match=r"aten\.embedding.*got -1"):
        guarded.prefill(slot, bad, want_logits=True)
    assert operators.calls.total() == before
