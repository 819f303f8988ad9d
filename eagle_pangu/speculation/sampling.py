"""From logits to the token that the teacher decides. Greedy; ties go to the smallest id."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Choice(NamedTuple):
    """What the teacher decides after each row.

    token_ids: [rows] int64; margins: [rows] float32, logit of the chosen id minus the next best, >= 0.
    """

    token_ids: NDArray[np.int64]
    margins: NDArray[np.float32]


def greedy(logits: torch.Tensor) -> Choice:
    """The arg-max of each row of [rows, vocab] logits and its top-2 margin.

    The margin says how near a tie was: a divergence between numerics policies is excused only where it is tiny.
    """
    token_ids = logits.argmax(dim=-1, keepdim=True)
    best = logits.gather(-1, token_ids)
    runner_up = logits.scatter(-1, token_ids, float("-inf")).amax(dim=-1, keepdim=True)
    margins = (best.float() - runner_up.float()).squeeze(-1)
    return Choice(token_ids.squeeze(-1).cpu().numpy(), margins.cpu().numpy())
