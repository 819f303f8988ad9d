"""The engine against transformers' own forward, against itself one token at a time, and under attack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_pangu.speculation.engine import Engine, NoInvarianceError
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree
from eagle_pangu.speculation.warm_up import warm_up
from protos.errors import InvalidFieldError
from tests.models import ARCHITECTURES
from tests.speculation.engines import NUMERICS, bushy_tree, engine, one_by_one, prompt


def verified(target: Engine, ids: np.ndarray, tree: TokenTree) -> torch.Tensor:
    slot = target.open_slot()
    target.prefill(slot, ids, want_logits=False)
    logits = target.verify(slot, tree).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
def test_every_tree_row_has_the_logits_that_transformers_gives_its_path(
    tmp_path: Path, architecture: str, mode: str, numerics: str
) -> None:
    target = engine(tmp_path, architecture, mode=mode, numerics=numerics)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / architecture, dtype=torch.float32)
    ids, tree = prompt(70), bushy_tree(12)
    logits = verified(target, ids, tree)
    for row in range(tree.rows):
        path = tree.token_ids[tree.ancestors[row, : tree.depth[row] + 1]]
        with torch.inference_mode():
            expected = plain(torch.from_numpy(np.concatenate([ids, path]))[None]).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 5, 37, 63, 64, 120, 126, 300])
def test_bitwise_tree_rows_equal_one_by_one_decoding_to_the_bit(
    tmp_path: Path, dtype: torch.dtype, length: int
) -> None:
    target = engine(tmp_path, dtype=dtype, numerics="bitwise")
    ids, tree = prompt(length), bushy_tree(16, seed=length)
    together = verified(target, ids, tree)
    for row in range(tree.rows):
        assert torch.equal(together[row], one_by_one(target, ids, tree, row)), f"row {row}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 33, 65])
def test_bitwise_rows_keep_their_bits_whatever_the_size_of_the_tree(
    tmp_path: Path, dtype: torch.dtype, rows: int
) -> None:
    target = engine(tmp_path, dtype=dtype, numerics="bitwise")
    ids, tree = prompt(90), bushy_tree(rows, seed=rows)
    together = verified(target, ids, tree)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(together[row], one_by_one(target, ids, tree, row)), f"row {row}"


@pytest.mark.parametrize("chunk", [1, 7, 16, 31, 32, 100])
def test_bitwise_prefill_writes_the_same_kv_in_any_chunks(tmp_path: Path, chunk: int) -> None:
    target = engine(tmp_path, dtype=torch.bfloat16, numerics="bitwise")
    ids, tree = prompt(200), bushy_tree(8)
    whole, pieces = target.open_slot(), target.open_slot()
    target.prefill(whole, ids, want_logits=False)
    for start in range(0, len(ids), chunk):
        target.prefill(pieces, ids[start : start + chunk], want_logits=False)
    assert torch.equal(target.verify(whole, tree).logits, target.verify(pieces, tree).logits)


@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
def test_changing_a_sibling_branch_moves_no_bit_of_a_row(tmp_path: Path, mode: str, numerics: str) -> None:
    target = engine(tmp_path, mode=mode, numerics=numerics)
    ids = prompt(50)
    parents = [0, 0, 0, 1, 2, 3, 4]
    before = verified(target, ids, TokenTree.build([9, 1, 2, 3, 4, 5, 6], parents))
    after = verified(target, ids, TokenTree.build([9, 1, 102, 3, 104, 5, 106], parents))
    mine, changed = [0, 1, 3, 5], [2, 4, 6]
    assert torch.equal(before[mine], after[mine])
    assert all(not torch.equal(before[row], after[row]) for row in changed)


@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
@pytest.mark.parametrize("branch", ["shared", "replicate"])
def test_nan_in_rejected_rows_never_surfaces(tmp_path: Path, mode: str, numerics: str, branch: str) -> None:
    target = engine(tmp_path, mode=mode, numerics=numerics, branch=branch)
    ids = prompt(61)
    next_tree = bushy_tree(6, seed=3)
    clean, poisoned = target.open_slot(), target.open_slot()
    for slot in (clean, poisoned):
        target.prefill(slot, ids, want_logits=False)
        target.verify(slot, TokenTree.build([9, 1, 2, 3, 4, 5], [0, 0, 0, 2, 1, 3]))
        target.commit(slot, [2, 3])
    for storage in {poisoned._main, poisoned._branch}:
        storage.keys[:, :, poisoned.committed_length :] = float("nan")
        storage.values[:, :, poisoned.committed_length :] = float("nan")
    for tree in (next_tree, TokenTree.root_only(7)):
        logits = target.verify(poisoned, tree).logits
        assert torch.isfinite(logits).all()
        assert torch.equal(logits, target.verify(clean, tree).logits)


@pytest.mark.parametrize("branch", ["shared", "replicate"])
@pytest.mark.parametrize("path", [[], [1], [1, 2], [3], [1, 2, 4], [1, 5, 6]])
def test_decoding_goes_on_after_any_committed_path_as_if_it_had_been_the_prompt(
    tmp_path: Path, branch: str, path: list[int]
) -> None:
    target = engine(tmp_path, numerics="bitwise", branch=branch)
    ids = prompt(30)
    tree = TokenTree.build([9, 1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 2, 1, 5])
    slot, plain = target.open_slot(), target.open_slot()
    target.prefill(slot, ids, want_logits=False)
    target.verify(slot, tree)
    target.commit(slot, path)
    target.prefill(plain, np.concatenate([ids, tree.token_ids[[0, *path]]]), want_logits=False)
    assert slot.committed_length == plain.committed_length
    following = bushy_tree(9, seed=1)
    assert torch.equal(target.verify(slot, following).logits, target.verify(plain, following).logits)


def test_an_aborted_branch_leaves_no_trace(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="bitwise")
    ids, tree = prompt(40), bushy_tree(5)
    slot = target.open_slot()
    target.prefill(slot, ids, want_logits=False)
    expected = target.verify(slot, tree).logits.clone()
    target.abort(slot)
    target.verify(slot, bushy_tree(12, seed=5))
    assert torch.equal(target.verify(slot, tree).logits, expected)


def test_a_tree_grown_level_by_level_equals_the_tree_at_once(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="bitwise")
    ids = prompt(33)
    tree = TokenTree.build([9, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 2, 3, 5])
    slot = target.open_slot()
    target.prefill(slot, ids, want_logits=False)
    at_once = target.verify(slot, tree).logits.clone()
    target.abort(slot)
    for start, end in ((0, 1), (1, 3), (3, 6), (6, 8)):
        level = TokenTree.build(tree.token_ids[:end], tree.parents[:end])
        assert torch.equal(target.run([Segment(slot, level, start)])[0].logits, at_once[start:end])


def test_features_are_the_hidden_states_at_the_entries_of_three_layers(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="bitwise")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    ids = prompt(20)
    features = target.prefill(target.open_slot(), ids, want_logits=False, want_features=True).features
    with torch.inference_mode():
        hidden = plain(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    layers = plain.config.num_hidden_layers
    expected = torch.cat([hidden[index][0] for index in (2, layers // 2, layers - 3)], dim=-1)
    assert features.dtype == torch.bfloat16
    torch.testing.assert_close(features.float(), expected, atol=2e-2, rtol=2e-2)


def test_features_do_not_depend_on_chunks_or_company(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="bitwise")
    ids = prompt(48)
    whole = target.prefill(target.open_slot(), ids, want_logits=False, want_features=True).features
    slot = target.open_slot()
    first = target.prefill(slot, ids[:40], want_logits=False, want_features=True).features
    rest = TokenTree.build(ids[40:], np.maximum(np.arange(8) - 1, 0))
    second = target.verify(slot, rest, want_features=True).features
    assert torch.equal(whole, torch.cat([first, second]))


def test_reference_mode_refuses_a_malformed_tree_before_the_model_runs(tmp_path: Path) -> None:
    target = engine(tmp_path, mode="reference", numerics="free")
    slot = target.open_slot()
    target.prefill(slot, prompt(4), want_logits=False)
    with pytest.raises(InvalidFieldError, match=r"tree\.parents\[1\]"):
        target.verify(slot, TokenTree.build([1, 2, 3], [0, 2, 1]))
    assert slot.branch_rows == 0


def test_rows_beyond_the_capacity_are_refused(tmp_path: Path) -> None:
    target = engine(tmp_path)
    slot = target.open_slot(64)
    target.prefill(slot, prompt(60), want_logits=False)
    with pytest.raises(ValueError, match="exceed 64 columns"):
        target.verify(slot, bushy_tree(5))


@pytest.mark.parametrize("capacity", [16, 64, 100])
def test_an_engine_of_small_slots_warms_up(tmp_path: Path, capacity: int) -> None:
    warm_up(engine(tmp_path, slot_capacity=capacity))


def test_auto_falls_back_to_free_and_says_why_where_no_class_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_pangu.speculation.invariance.probe_row_counts", lambda *args: (16,))
    degraded = engine(tmp_path, numerics="auto").numerics
    assert degraded.policy == "free"
    assert "bits depend on the row count" in degraded.degraded_reason
    with pytest.raises(NoInvarianceError):
        engine(tmp_path, numerics="bitwise")


def test_the_self_test_notices_attention_that_is_not_invariant(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="bitwise")
    warm_up(target)
    honest = target._kernel

    def drifting(query: torch.Tensor, *rest: object) -> torch.Tensor:
        return honest(query, *rest) + query.shape[1] * 1e-6

    target._kernel = drifting
    with pytest.raises(NoInvarianceError, match="self-test"):
        warm_up(target)
    lenient = engine(tmp_path, numerics="auto")
    lenient._kernel = drifting
    warm_up(lenient)
    assert lenient.numerics.policy == "free"
    assert "self-test" in lenient.numerics.degraded_reason


@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
@pytest.mark.parametrize("branch", ["shared", "replicate"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 70])
def test_a_slot_that_adopts_goes_on_as_if_it_had_read_the_tokens(
    tmp_path: Path, mode: str, numerics: str, branch: str, kept: bool, length: int
) -> None:
    """From prefilled tokens and from a tree's committed rows; NaN lies everywhere else."""
    target = engine(tmp_path, mode=mode, numerics=numerics, branch=branch)
    tree = TokenTree.build([9, 1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 2, 1, 5])
    source, adopting, cold = target.open_slot(), target.open_slot(80), target.open_slot()
    target.prefill(source, prompt(66), want_logits=False)
    target.verify(source, tree)
    target.commit(source, [1, 5, 6])
    assert source.committed_length == 70
    text = np.concatenate([prompt(66), tree.token_ids[[0, 1, 5, 6]]])[:length]
    target.prefill(cold, text, want_logits=False)
    for slot, columns in ((source, 70), (adopting, 0)):
        slot._main.keys[:, :, columns:] = float("nan")
        slot._main.values[:, :, columns:] = float("nan")
    adopting.adopt(source.keep() if kept else source, length)
    following = bushy_tree(9, seed=1)
    logits, expected = (target.verify(slot, following).logits for slot in (adopting, cold))
    if numerics == "bitwise":
        assert torch.equal(logits, expected)
    else:
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("chunk", [1, 16, 50])
def test_prefill_gives_the_logits_of_every_row_on_demand_in_the_bits_of_the_last_one(
    tmp_path: Path, chunk: int
) -> None:
    target = engine(tmp_path, numerics="bitwise")
    ids, one_by_one_slot, slot = prompt(50), target.open_slot(), target.open_slot()
    alone = [target.prefill(one_by_one_slot, ids[row : row + 1], want_logits=True).logits[0] for row in range(len(ids))]
    together = [
        target.prefill(slot, ids[start : start + chunk], want_logits=True, every_row=True).logits
        for start in range(0, len(ids), chunk)
    ]
    assert torch.equal(torch.cat(together), torch.stack(alone))
