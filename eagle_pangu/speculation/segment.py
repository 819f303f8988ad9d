"""What one session has computed in a forward pass: some rows of a tree over its slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.buckets import Buckets
from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.plan import ForwardPlan
from eagle_pangu.speculation.tree import TokenTree


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows ``first_row ...`` of a tree that stands on the committed tokens of a slot.

    slot: of the session; no two segments of one pass share it. first_row: the rows before it are the slot's branch
    already; 0 replaces any branch. logits_from: the first row whose logits are wanted; None: none are. final: the rows
    are known tokens, one after the other, committed as soon as they are computed (prefill).
    """

    slot: Slot
    tree: TokenTree
    first_row: int = 0
    logits_from: int | None = 0
    want_features: bool = False
    final: bool = False

    @property
    def rows(self) -> int:
        """Rows computed."""
        return self.tree.rows - self.first_row

    def plan(self, group: int, buckets: Buckets | None = None) -> ForwardPlan:
        """Where its rows stand and what they see, on the slot's device; `group` query heads share a KV head.

        With `buckets`, rows are filled up to one.
        """
        padding = buckets.rows_for(self.rows) - self.rows if buckets else 0
        return ForwardPlan(
            self.tree, self.slot.committed_length, self.first_row, group, self.slot.shape.device, padding
        )


def known_tokens(
    slot: Slot,
    token_ids: NDArray[np.int64],
    *,
    want_logits: bool,
    want_features: bool = False,
    every_row: bool = False,
) -> Segment:
    """A chunk of known tokens to append and commit.

    Args:
        slot: any branch is dropped.
        token_ids: [n] int64, n >= 1.
        want_logits: those of the last token.
        want_features: [n, 3 * hidden].
        every_row: where logits are wanted, those of every token.
    """
    chain = TokenTree(token_ids, np.maximum(np.arange(len(token_ids)) - 1, 0))
    first = 0 if every_row else len(token_ids) - 1
    return Segment(slot, chain, 0, first if want_logits else None, want_features, final=True)
