"""Rows of several sessions in one pass: each gets what it would get alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_pangu.speculation.engine import Engine, ForwardResult
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree
from tests.models import ARCHITECTURES
from tests.speculation.engines import NUMERICS, bushy_tree, engine, prompt

LENGTHS = (1, 40, 64, 130, 7)
TREES = (12, 1, 16, 33, 2)


def segments(target: Engine) -> list[Segment]:
    """Trees of several sizes over prompts of several lengths, a prompt in the middle of its reading, and a new one."""
    mixed = []
    for length, rows in zip(LENGTHS, TREES, strict=True):
        slot = target.open_slot()
        target.prefill(slot, prompt(length, seed=length), want_logits=False)
        mixed.append(Segment(slot, bushy_tree(rows, seed=rows), want_features=rows > 10))
    going_on = target.open_slot()
    target.prefill(going_on, prompt(20), want_logits=False)
    mixed.insert(2, known_tokens(going_on, prompt(30, seed=5), want_logits=False, want_features=True))
    mixed.append(known_tokens(target.open_slot(), prompt(9, seed=6), want_logits=True))
    return mixed


def assert_same(one: ForwardResult, other: ForwardResult, *, bits: bool) -> None:
    assert one.rows == other.rows
    for ours, theirs in ((one.logits, other.logits), (one.features, other.features)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            if bits:
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs, atol=2e-2 if ours.dtype == torch.bfloat16 else 1e-4, rtol=1e-2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
def test_a_session_gets_what_it_gets_alone(tmp_path: Path, architecture: str, mode: str, numerics: str) -> None:
    target = engine(tmp_path, architecture, mode=mode, numerics=numerics)
    alone = [target.run([each])[0] for each in segments(target)]
    for together, expected in zip(target.run(segments(target)), alone, strict=True):
        assert_same(together, expected, bits=numerics == "bitwise")


@pytest.mark.parametrize("branch", ["shared", "replicate"])
def test_bfloat16_bits_do_not_depend_on_the_company(tmp_path: Path, branch: str) -> None:
    target = engine(tmp_path, dtype=torch.bfloat16, numerics="bitwise", branch=branch)
    alone = [target.run([each])[0] for each in segments(target)]
    mixed = segments(target)
    for order in (range(7), (6, 2, 0, 4, 1, 3, 5)):
        fresh = [segments(target)[index] for index in order]
        for index, together in zip(order, target.run(fresh), strict=True):
            assert_same(together, alone[index], bits=True)
    for index in (1, 3):
        assert_same(target.run([mixed[index]])[0], alone[index], bits=True)


@pytest.mark.parametrize("numerics", ["bitwise", "free"])
def test_rounds_of_one_session_do_not_move_the_kv_of_another(tmp_path: Path, numerics: str) -> None:
    target = engine(tmp_path, numerics=numerics)
    ours, theirs = target.open_slot(), target.open_slot()
    target.run([known_tokens(slot, prompt(50, seed=1), want_logits=False) for slot in (ours, theirs)])
    tree = TokenTree.build([9, 1, 2, 3, 4], [0, 0, 1, 0, 2])
    expected = target.verify(theirs, tree).logits
    for round_ in range(3):
        target.run([Segment(ours, bushy_tree(9, seed=round_)), Segment(theirs, tree)])
        target.commit(ours, [1])
        target.abort(theirs)
    logits = target.verify(theirs, tree).logits
    assert logits is not None
    assert expected is not None
    torch.testing.assert_close(logits, expected, atol=0 if numerics == "bitwise" else 1e-4, rtol=0)


def test_only_known_tokens_are_committed(tmp_path: Path) -> None:
    target = engine(tmp_path)
    reading, verifying = target.open_slot(), target.open_slot()
    target.prefill(verifying, prompt(5), want_logits=False)
    results = target.run([known_tokens(reading, prompt(8), want_logits=False), Segment(verifying, bushy_tree(4))])
    assert (reading.committed_length, reading.branch_rows) == (8, 0)
    assert (verifying.committed_length, verifying.branch_rows) == (5, 4)
    assert results[0].logits is None


def test_a_pass_that_fails_commits_nothing_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine(tmp_path, numerics="bitwise")
    expected = [target.run([each])[0] for each in segments(target)]
    mixed = segments(target)
    lengths = [each.slot.committed_length for each in mixed]
    full = Segment(target.open_slot(64), TokenTree.build(np.arange(70), np.zeros(70, dtype=np.int64)))
    with pytest.raises(ValueError, match="exceed 64 columns"):
        target.run([*mixed, full])
    assert [each.slot.committed_length for each in mixed] == lengths
    for together, alone in zip(target.run(mixed), expected, strict=True):
        assert_same(together, alone, bits=True)
