"""From logits to the best next tokens of every row: where a model's tensors become the host's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.indexing import marked


class Children(NamedTuple):
    """The best next tokens of several rows.

    rows: [children] which row of the logits, ascending. token_ids: [children], best first within a row.
    log_probs: [children] float32, finite.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]

    def split(self, counts: Sequence[int]) -> list[Children]:
        """Those of the first ``counts[0]`` rows, of the next ``counts[1]`` and so on, rows numbered anew in each."""
        ends = np.cumsum(counts)
        places = np.searchsorted(self.rows, ends[:-1])
        parts = (np.split(column, places) for column in self)
        return [
            Children(rows - (end - count), token_ids, log_probs)
            for end, count, rows, token_ids, log_probs in zip(ends, counts, *parts, strict=True)
        ]


NO_CHILDREN = Children(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


def top_children(logits: torch.Tensor, width: int) -> Children:
    """The `width` most probable tokens of each row, ties by id; fewer where fewer have a finite log-probability.

    `topk` leaves the order of ties open, so it only finds the threshold.

    Args:
        logits: [rows, vocab_size] of any float dtype; log-probabilities are float32.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    threshold = log_probs.topk(min(width, log_probs.shape[1])).values[:, -1:]
    mask = (log_probs >= threshold) & log_probs.isfinite()
    rows, token_ids = marked(mask)
    values = log_probs.masked_select(mask).cpu().numpy()
    order = np.lexsort((token_ids, -values, rows))
    rank = np.arange(len(order)) - np.searchsorted(rows, rows)
    order = order[rank < width]
    return Children(rows[order], token_ids[order], values[order])
