"""How an engine calls Ascend's operators: three kinds of call, the slot as it lies, a mask a pass and not a layer."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_pangu.speculation.devices.npu import masks
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.segment import Segment
from tests.simulated_npu import operators
from tests.speculation.engines import bushy_tree, prompt
from tests.speculation.npu.operator_device import NEAR, furthest_row, operator_engine

V2, V1, FUSION = "npu_fused_infer_attention_score_v2", "npu_fused_infer_attention_score", "npu_fusion_attention"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "llama"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every call of version 2 from here on."""
    calls: list[dict[str, Any]] = []
    real = operators.npu_fused_infer_attention_score_v2

    def recorded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        calls.append({"query": query, "key": key, "value": value, **options})
        return real(query, key, value, **options)

    monkeypatch.setattr(operators, V2, recorded)
    return calls


def ready(directory: Path, seen: list[dict[str, Any]], **options: Any) -> Engine:
    engine = operator_engine(directory, **options)
    seen.clear()  # what the comparison at start called
    return engine


def test_a_chunk_of_the_prompt_is_causal(directory: Path, seen: list[dict[str, Any]]) -> None:
    engine = ready(directory, seen)
    slot = engine.open_slot()
    for length in (16, 16):
        engine.prefill(slot, prompt(length), want_logits=False)
    assert [call["sparse_mode"] for call in seen] == [3] * len(seen)
    assert [call["actual_seq_kvlen"] for call in seen] == [[16]] * 4 + [[32]] * 4
    assert len({call["atten_mask"].data_ptr() for call in seen}) == 1


def test_a_chunk_that_is_filled_up_has_a_mask_of_its_own(directory: Path, seen: list[dict[str, Any]]) -> None:
    """The causal mode counts from the last row; rows that fill up would move it."""
    engine = ready(directory, seen)
    engine.prefill(engine.open_slot(), prompt(5), want_logits=False)
    assert {(call["query"].shape[2], call["sparse_mode"], call["inner_precise"]) for call in seen} == {(8, 0, 2)}


def test_one_row_needs_no_mask(directory: Path, seen: list[dict[str, Any]]) -> None:
    engine = ready(directory, seen)
    slot = engine.open_slot()
    engine.prefill(slot, prompt(1), want_logits=True)
    assert all("atten_mask" not in call and call["actual_seq_kvlen"] == [1] for call in seen)


def test_a_tree_has_one_mask_for_all_layers_over_the_whole_slot(directory: Path, seen: list[dict[str, Any]]) -> None:
    engine = ready(directory, seen)
    slot, tree = engine.open_slot(), bushy_tree(9)
    engine.prefill(slot, prompt(20), want_logits=False)
    seen.clear()
    engine.verify(slot, tree)
    assert len(seen) == 4
    assert len({call["atten_mask"].data_ptr() for call in seen}) == 1
    mask = seen[0]["atten_mask"]
    assert mask.shape == (1, 1, 16, seen[0]["key"].shape[2])
    assert torch.equal(~mask[0, 0, :9, 20:29], torch.from_numpy(tree.mask))
    assert not mask[..., :20].any()
    assert mask[..., 29:].all()


def test_the_operator_reads_the_slot_as_it_lies(directory: Path, seen: list[dict[str, Any]]) -> None:
    engine = ready(directory, seen)
    slot = engine.open_slot()
    for tokens in (16, 5, 1):
        engine.prefill(slot, prompt(tokens), want_logits=False)
    engine.verify(slot, bushy_tree(6))
    for index, call in enumerate(seen):
        for name, own in zip(("key", "value"), slot.columns(index % 4), strict=True):
            assert call[name].data_ptr() == own.data_ptr()
            assert call[name].shape == own.shape


def test_each_session_of_a_pass_has_its_own_call(directory: Path, seen: list[dict[str, Any]]) -> None:
    engine = ready(directory, seen)
    slots = [engine.open_slot(), engine.open_slot()]
    for slot, tokens in zip(slots, (3, 7), strict=True):
        engine.prefill(slot, prompt(tokens), want_logits=False)
    seen.clear()
    engine.run([Segment(slot, bushy_tree(5)) for slot in slots])
    assert Counter(call["actual_seq_kvlen"][0] for call in seen) == {8: 4, 12: 4}


def test_a_mask_goes_with_its_pass(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[masks.PlanMasks] = []
    real = masks.PlanMasks.__init__

    def remembered(self: masks.PlanMasks) -> None:
        made.append(self)
        real(self)

    monkeypatch.setattr(masks.PlanMasks, "__init__", remembered)
    engine = operator_engine(directory)
    for _ in range(3):
        engine.verify(engine.open_slot(), bushy_tree(6))
    gc.collect()
    assert [len(each._masks) for each in made] == [0] * len(made)


@pytest.mark.parametrize("attention", [V2, V1, FUSION, "sdpa", "eager"])
def test_tree_rows_equal_one_by_one_decoding(directory: Path, attention: str) -> None:
    """Also over a slot whose unused columns hold what a rejected branch, or anybody, left behind."""
    engine = operator_engine(directory, attention=attention)
    assert engine.numerics.attention == attention
    slot = engine.open_slot()
    for table in slot.columns(0) + slot.columns(3):
        table.fill_(float("nan"))
    assert furthest_row(engine, slot) < NEAR
