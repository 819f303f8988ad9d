"""A host device with the attention of an Ascend one, by the stand-in of its operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices.base import Attention, HeadShape
from eagle_pangu.speculation.devices.npu.choice import choose_attention
from eagle_pangu.speculation.engine import Engine
from tests.models import tiny_model
from tests.simulated_npu import operators
from tests.speculation.engines import BucketedCpu, bushy_tree, one_by_one, prompt

NEAR = 0.3  # between logits of size 7 in bfloat16, after four layers


class OperatorDevice(BucketedCpu):
    """Tensors of the host, static shapes, attention of the stand-in."""

    def attention(self, name: str, heads: HeadShape) -> Attention:
        """As on an Ascend device."""
        return choose_attention(name, heads, operators, torch.device("cpu"))


def operator_engine(directory: Path, **options: Any) -> Engine:
    """A bfloat16 engine under `free` numerics over a random checkpoint, on that device."""
    if not directory.is_dir():
        tiny_model(directory)
    device = OperatorDevice()
    checkpoint = load_checkpoint(directory, torch.bfloat16, device)
    return Engine(checkpoint, device, **{"numerics": "free", "slot_capacity": 256, "chunk": 16, **options})


def furthest_row(engine: Engine, slot: Slot) -> float:
    """The largest difference between a tree row's logits and those of decoding its path one token at a time.

    The prompt ends in a chunk that is filled up; the tree is verified in `slot`, empty so far, its paths in fresh ones.
    """
    ids, tree = prompt(21), bushy_tree(9)
    engine.prefill(slot, ids[: engine.chunk], want_logits=False)
    engine.prefill(slot, ids[engine.chunk :], want_logits=False)
    logits = engine.verify(slot, tree).logits
    assert logits is not None
    differences = [(logits[row].float() - one_by_one(engine, ids, tree, row).float()).abs() for row in (0, 3, 6, 8)]
    return float(torch.stack(differences).max())
