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

    `topk` leaves open which of equal values it takes, and in what order: of those equal to the last one all compete.

    Args:
        logits: [rows, vocab_size] of any float dtype; log-probabilities are float32.
    """
    logits = logits.float()
    width = min(width, logits.shape[1])
    best = logits.topk(width)
    last = best.values[:, -1:]
    last_rows, last_ids = marked(logits == last)
    values, ids = best.values.cpu().numpy(), best.indices.cpu().numpy()
    above_rows, above_places = np.nonzero(values > values[:, -1:])
    rows = np.concatenate([above_rows, last_rows])
    token_ids = np.concatenate([ids[above_rows, above_places], last_ids])
    scores = np.concatenate([values[above_rows, above_places], values[last_rows, -1]])
    log_probs = scores - logits.logsumexp(dim=-1).cpu().numpy()[rows]
    order = np.lexsort((token_ids, -scores, rows))
    rank = np.arange(len(order)) - np.searchsorted(rows[order], rows[order])
    order = order[(rank < width) & np.isfinite(log_probs[order])]
    return Children(rows[order], token_ids[order], log_probs[order])
