"""Engines over tiny random checkpoints, and trees to run through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.devices.cpu import CpuDevice
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.tree import TokenTree
from tests.models import VOCAB_SIZE, tiny_model

NUMERICS = (("performance", "bitwise"), ("performance", "free"), ("reference", "bitwise"), ("reference", "free"))


class BucketedCpu(CpuDevice):
    """A CPU on which a new shape is said to be dear."""

    static_shapes = True


def engine(directory: Path, architecture: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    """An engine over a fresh random checkpoint of that architecture."""
    path = directory / architecture
    if not path.is_dir():
        tiny_model(path, architecture)
    device = get_device("cpu")
    return Engine(load_checkpoint(path, dtype, device), device, **{"slot_capacity": 512, **options})


def prompt(length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[length] random ids."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)


def bushy_tree(rows: int, seed: int = 0, reach: int = 4) -> TokenTree:
    """A random tree; each parent is among the `reach` rows before, so branches interleave."""
    random = np.random.default_rng(seed)
    parents = [0] + [int(random.integers(max(0, row - reach), row)) for row in range(1, rows)]
    return TokenTree.build(random.permutation(VOCAB_SIZE)[:rows], parents)


def one_by_one(engine: Engine, ids: np.ndarray[Any, np.dtype[np.int64]], tree: TokenTree, row: int) -> torch.Tensor:
    """[vocab] logits of a tree row from plain decoding of its path, one token a pass, on a fresh slot."""
    slot = engine.open_slot()
    engine.prefill(slot, ids, want_logits=False)
    for ancestor in tree.ancestors[row, : tree.depth[row] + 1]:
        logits = engine.prefill(slot, tree.token_ids[ancestor : ancestor + 1], want_logits=True).logits
    assert logits is not None
    return logits[0]
