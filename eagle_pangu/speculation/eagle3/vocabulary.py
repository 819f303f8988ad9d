"""Which ids of the teacher a head can propose, as heads store it.

`d2t`, int64 [draft_vocab_size], holds offsets: draft id i stands for the teacher's id i + d2t[i]. `t2d`, bool
[vocab_size], marks those ids, in no other order than their own. Both may be left out where the head proposes every id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eagle_pangu.speculation.eagle3.errors import HeadError
from eagle_pangu.speculation.indexing import fill


class StoredVocabulary(NamedTuple):
    """The two tensors of a file; None where there is none."""

    d2t: torch.Tensor | None
    t2d: torch.Tensor | None


def target_ids_of(stored: StoredVocabulary, draft_vocab_size: int, vocab_size: int) -> torch.Tensor:
    """[draft_vocab_size] int64 teacher id of each draft id, ascending.

    Raises:
        HeadError: a tensor is missing, misshapen, out of range, out of order, or contradicts the other.
    """
    d2t, t2d = stored
    if d2t is None:
        if draft_vocab_size < vocab_size:
            raise HeadError(f"d2t: expected int64 [{draft_vocab_size}] into {vocab_size} ids, found none")
        d2t = torch.zeros(draft_vocab_size, dtype=torch.int64)
    if d2t.shape != (draft_vocab_size,) or d2t.dtype not in (torch.int64, torch.int32):
        raise HeadError(f"d2t: expected int64 [{draft_vocab_size}], found {_described(d2t)}")
    target_ids = torch.arange(draft_vocab_size) + d2t
    _check_target_ids("d2t", target_ids, vocab_size)
    if t2d is not None:
        if t2d.shape != (vocab_size,) or t2d.dtype != torch.bool:
            raise HeadError(f"t2d: expected bool [{vocab_size}], found {_described(t2d)}")
        wrong = (t2d != _marked(target_ids, vocab_size)).nonzero().flatten()
        if wrong.numel():
            first = int(wrong[0])
            raise HeadError(f"t2d: expected the ids of d2t, found {bool(t2d[first])} at id {first}")
    return target_ids


def stored_vocabulary(target_ids: torch.Tensor, vocab_size: int) -> StoredVocabulary:
    """What a file holds for those ids, [draft_vocab_size] int64; nothing where they are all of them.

    Raises:
        HeadError: ids out of range or out of order.
    """
    _check_target_ids("target_ids", target_ids, vocab_size)
    if len(target_ids) == vocab_size:
        return StoredVocabulary(None, None)
    return StoredVocabulary(target_ids - torch.arange(len(target_ids)), _marked(target_ids, vocab_size))


def _check_target_ids(name: str, target_ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse ids out of range or not strictly ascending."""
    outside = ((target_ids < 0) | (target_ids >= vocab_size)).nonzero().flatten()
    if outside.numel():
        row = int(outside[0])
        raise HeadError(f"{name}: expected ids below {vocab_size}, found {int(target_ids[row])} at draft id {row}")
    falling = (target_ids.diff() <= 0).nonzero().flatten()
    if falling.numel():
        row = int(falling[0])
        pair = target_ids[row : row + 2].tolist()
        raise HeadError(f"{name}: expected ascending ids, found {pair} at draft ids {row} and {row + 1}")


def _marked(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    fill(mask, 0, target_ids, True)
    return mask


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
