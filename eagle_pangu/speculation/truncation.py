"""Which tokens of a row are left to sample from: top-k, top-p and min-p, in this order, as transformers' warpers do.

One row at a time and on the host, so what stands beside a row cannot change its result. The vocabulary is not sorted as
a whole where its best part is enough: whether a token is left depends on the tokens above it alone (and on the sum of
all weights, which needs no order). The weights are added up from the best one down, so the sums over a part are those
over the whole to the bit, and once they reach the cut the part has decided as the whole would.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.parameters import SamplingParameters

FIRST_PART, GROWTH = 256, 8
"""How many of the best scores are tried first, and how many times as many after that, until they hold top_p."""


def likely(scores: NDArray[np.float32], parameters: SamplingParameters) -> NDArray[np.int64]:
    """The ids that are left, ascending; always the best one, never a banned one.

    Args:
        scores: [vocab] divided by the temperature; at least one is finite, banned ones are -inf.
        parameters: of which `truncates` is true.
    """
    lowest, most = np.finfo(np.float32).min, len(scores)
    if parameters.top_k or parameters.top_p < 1:
        lowest, most = _cut(scores, parameters)
    if parameters.min_p > 0:
        least = scores.max() + np.float32(math.log(parameters.min_p))
        if least > lowest:
            lowest, most = least, len(scores)
    ids = np.flatnonzero(scores >= lowest)
    if len(ids) > most:  # too many have the lowest score of all that are left: of these, the smaller ids stay
        tied = np.flatnonzero(scores[ids] == lowest)
        ids = np.delete(ids, tied[most - len(ids) :])
    return ids


def _cut(scores: NDArray[np.float32], parameters: SamplingParameters) -> tuple[np.float32, int]:
    """The lowest score that top-k and top-p leave, and how many tokens they leave."""
    width = min(parameters.top_k, len(scores)) or len(scores)
    if parameters.top_p == 1:
        best = _best(scores, width)
        return best[-1], len(best)
    # As far as top-k goes, the weights of all that it leaves are needed; else their sum is had without an order.
    whole = None if parameters.top_k else np.exp(scores - scores.max()).sum(dtype=np.float64)
    count = width if parameters.top_k else FIRST_PART
    while True:
        best = _best(scores, count)
        mass = np.exp(best - best[0]).cumsum(dtype=np.float64)
        target = parameters.top_p * (mass[-1] if whole is None else whole)
        if mass[-1] >= target or count >= width:
            break
        count *= GROWTH
    kept = min(int(np.searchsorted(mass, target)) + 1, len(best))  # the first one that reaches it is the last one left
    return best[kept - 1], kept


def _best(scores: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """So many of the best scores, best first; fewer where banned ones would be among them."""
    scores = scores[scores > -np.inf]  # also since so many equal ones make the partition slow
    if count < len(scores):
        scores = np.partition(scores, -count)[-count:]
    best: NDArray[np.float32] = np.negative(np.sort(np.negative(scores)))
    return best
