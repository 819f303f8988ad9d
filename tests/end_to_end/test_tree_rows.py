"""Every row of a tree has, to the bit, the logits of decoding its path one token at a time: on the real model."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.engine import Engine
from tests.speculation.engines import bushy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 16
LENGTHS = (5, 60, 126)
"""Of the prompt: within a block of 64 columns, with the tree over its end, and over the end of the second."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, model_directory: Path) -> Engine:
    device = get_device("cpu")
    checkpoint = load_checkpoint(model_directory, getattr(torch, request.param), device)
    return Engine(checkpoint, device, slot_capacity=192, numerics="bitwise")


@pytest.mark.parametrize("length", LENGTHS)
def test_tree_rows_are_those_of_one_by_one_decoding(engine: Engine, length: int) -> None:
    text = np.random.default_rng(length).integers(100, 20_000, length)
    tree = bushy_tree(ROWS, seed=length)
    slot = engine.open_slot()
    engine.prefill(slot, text, want_logits=False)
    assert engine.numerics.policy == "bitwise"
    # A row's sequence goes on from its parent's, so that each row takes one pass.
    histories: dict[int, Slot] = {}
    expected: dict[int, torch.Tensor] = {}
    for row, parent in enumerate(tree.parents.tolist()):
        histories[row] = deepcopy(histories[parent] if row else slot)
        logits = engine.prefill(histories[row], tree.token_ids[row : row + 1], want_logits=True).logits
        assert logits is not None
        expected[row] = logits[0]
    together = engine.verify(slot, tree).logits
    assert together is not None
    for row, alone in expected.items():
        assert torch.equal(together[row], alone), f"row {row}"
