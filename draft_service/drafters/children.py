"""From logits to the best next tokens of every row: where a model's tensors become the host's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from eagle_pangu.speculation.indexing import index_tensor, marked, select

BLOCK = 64
"""Ids whose largest logit is looked at first, in `top_children`."""


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

    The best of all tokens lie in the few blocks of ids that have the best maxima: one reading of the row finds these,
    and a sort sees little else.

    Args:
        logits: [rows, vocab_size] of any float dtype; log-probabilities are float32.
    """
    logits, vocab_size = logits.float(), logits.shape[1]
    if missing := BLOCK * max(width, -(-vocab_size // BLOCK)) - vocab_size:
        logits = F.pad(logits, (0, missing), value=-torch.inf)
    blocks = logits.unflatten(1, (-1, BLOCK))
    maxima = blocks.amax(dim=2)
    peaks = maxima.amax(dim=1, keepdim=True)
    # As `logsumexp`, which takes half as long again.
    log_sums = (logits - peaks).exp_().sum(dim=1, keepdim=True).log_().add_(peaks)
    # Nothing below the least of the `width` best maxima is among the `width` best; of what equals it all compete.
    least = maxima.topk(width).values[:, -1:]
    of_row, of_block = marked(maxima >= least)
    index = index_tensor(of_row * maxima.shape[1] + of_block, maxima.numel(), logits.device, field="blocks")
    values = select(blocks.flatten(0, 1), 0, index).cpu().numpy()
    found, places = np.nonzero(values >= least.cpu().numpy()[of_row])
    rows, token_ids, scores = of_row[found], of_block[found] * BLOCK + places, values[found, places]
    log_probs = scores - log_sums.cpu().numpy()[rows, 0]
    order = np.lexsort((-scores, rows))  # stable: ids ascend already
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    order = order[(rank < width) & np.isfinite(log_probs[order])]
    return Children(rows[order], token_ids[order], log_probs[order])
