"""From logits to the token that the teacher decides. Greedy; ties go to the smallest id."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray


class Choice(NamedTuple):
    """What the teacher decides after each row.

    token_ids: [rows] int64; margins: [rows] float32, logit of the chosen id minus the next best, >= 0.
    """

    token_ids: NDArray[np.int64]
    margins: NDArray[np.float32]


_PIECE = 256


def greedy(logits: torch.Tensor) -> Choice:
    """The arg-max of each row of [rows, vocab] logits and its top-2 margin.

    In two steps, over pieces of the vocabulary and then inside the best one: `argmax` over a whole row is not
    vectorised on CPUs, and takes ten times as long. The margin says how near a tie was: a divergence between numerics
    policies is excused only where it is tiny.
    """
    rows, vocab = logits.shape
    nothing = float("-inf")
    pieces = F.pad(logits, (0, -vocab % _PIECE), value=nothing).view(rows, -1, _PIECE)
    highest = pieces.amax(dim=-1)
    piece = highest.argmax(dim=-1, keepdim=True)
    inside = pieces.gather(1, piece[..., None].expand(rows, 1, _PIECE)).squeeze(1)
    offset = inside.argmax(dim=-1, keepdim=True)
    best = inside.gather(-1, offset)
    elsewhere = highest.scatter(-1, piece, nothing).amax(dim=-1, keepdim=True)
    beside = inside.scatter(-1, offset, nothing).amax(dim=-1, keepdim=True)
    margins = best.float() - torch.maximum(elsewhere, beside).float()
    token_ids = piece * _PIECE + offset
    return Choice(token_ids.squeeze(-1).cpu().numpy(), margins.squeeze(-1).cpu().numpy())
