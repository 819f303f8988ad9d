"""A batch as a rectangle, [batch, longest tree]: tokens padded on the left, trees on the right (EQSPEC, DESIGN §8).

The synchronisation invariants of "Batch Speculative Decoding Done Right" are checked in every pass: padding and content
of all rows have one length, and position ids, taken from the mask, count a session's real tokens from 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.attention.kernels import MaskedAttention
from eagle_pangu.speculation.layouts.rectangle import Rectangle, SynchronisationError
from eagle_pangu.speculation.plan import ForwardPlan


class RectangularLayout:
    """See `Layout`: batch is the number of sessions, rows those of the longest tree.

    A row that pads a shorter tree is not valid in the sense of DESIGN §3: it points at row 0. It repeats the root and
    sees what the root sees, so it is finite, and nobody sees it.

    Args:
        rectangle: aligned to the slots of the pass; begun here.
        plans: of the segments, whole trees each.
        attention: under a dense mask.

    Raises:
        SynchronisationError: an invariant is broken; names the session's row.
    """

    def __init__(self, rectangle: Rectangle, plans: Sequence[ForwardPlan], attention: MaskedAttention) -> None:
        if any(plan.first_row for plan in plans):
            raise ValueError("expected whole trees: a rectangle holds no earlier rows of one")
        self.cache = rectangle
        self._attention = attention
        trees = [plan.tree for plan in plans]
        longest, group, device = max(tree.rows for tree in trees), plans[0].group, plans[0].device
        check_alignment(rectangle, plans)
        token_ids = np.empty((len(plans), longest), dtype=np.int64)
        keep = np.zeros((len(plans), longest, rectangle.end + longest), dtype=np.bool_)
        for row, pad, tree in zip(rectangle.rows, rectangle.pads, trees, strict=True):
            token_ids[row] = tree.padded(longest).token_ids
            keep[row, :, pad : rectangle.end] = True
            branch = keep[row, :, rectangle.end :]
            branch[: tree.rows, : tree.rows] = tree.mask
            branch[tree.rows :] = branch[0]
        # A row sees its path and no more: its place among the real tokens is how many it sees, itself the last.
        positions = keep.sum(axis=-1) - 1
        check_positions(positions[rectangle.rows], plans)
        rectangle.begin([tree.rows for tree in trees])
        self.first_rows = [row * longest for row in rectangle.rows]
        self.input_ids = torch.from_numpy(token_ids).to(device)
        self.position_ids = torch.from_numpy(positions).to(device)
        kv_heads = rectangle.kv_heads
        # Batch and KV heads are one dimension of the attention; a group of query heads lies one below the other. Four
        # dimensions in all: torch's fused kernel takes masks of two or four, and a slow one steps in elsewhere.
        self._keep = torch.from_numpy(keep).to(device)[:, None].repeat(1, kv_heads, group, 1).flatten(0, 1)[None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """All sessions in one call, each over its own row of the rectangle, pads and other branches hidden."""
        batch, heads, rows, head_dim = query.shape
        stacked = query.reshape(batch * key.shape[1], -1, head_dim)
        attended = self._attention(stacked, key.flatten(0, 1), value.flatten(0, 1), self._keep, scale)
        return attended.view(batch, heads, rows, head_dim).transpose(1, 2)


def check_alignment(rectangle: Rectangle, plans: Sequence[ForwardPlan]) -> None:
    """Rectangular alignment: every session has all its committed tokens there, and they end where all others do.

    Raises:
        SynchronisationError: one does not.
    """
    for row, (pad, length, plan) in enumerate(zip(rectangle.pads, rectangle.lengths, plans, strict=True)):
        if length != plan.committed:
            raise SynchronisationError(row, f"expected {plan.committed} committed tokens, got {length}")
        if pad < 0 or pad + length != rectangle.end:
            raise SynchronisationError(row, f"padding {pad} + content {length} is not the {rectangle.end} of all rows")


def check_positions(positions: NDArray[np.int64], plans: Sequence[ForwardPlan]) -> None:
    """Position-id contiguity: a root follows its committed tokens, every other row its parent, padded ones the root's.

    Args:
        positions: [batch, longest tree], in the order of the plans.
        plans: of the pass.

    Raises:
        SynchronisationError: a position is another.
    """
    for row, (own, plan) in enumerate(zip(positions, plans, strict=True)):
        expected = np.full(len(own), plan.committed)
        expected[: plan.rows] += plan.tree.depth
        if (own != expected).any():
            raise SynchronisationError(row, f"expected position ids {expected.tolist()}, got {own.tolist()}")
