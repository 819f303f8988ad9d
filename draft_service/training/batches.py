"""Sequences and what the teacher made of them, as the tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draft_service.training.answers import Answer
from draft_service.training.store import TeacherStore


class Batch(NamedTuple):
    """Sequences one after another, without padding.

    lengths, prompts: tokens of each sequence and of its prompt. token_ids: [tokens] int64.
    features: [tokens, 3 * hidden] float32. finals: [answers, hidden] float32 and argmax: [answers] int64 of the answer
    tokens; see `TeacherRows`.
    """

    lengths: list[int]
    prompts: list[int]
    token_ids: torch.Tensor
    features: torch.Tensor
    finals: torch.Tensor
    argmax: torch.Tensor


def load_batch(store: TeacherStore, sequences: Sequence[Answer], indices: Sequence[int], device: torch.device) -> Batch:
    """Read some sequences of a store.

    Args:
        store: open.
        sequences: in the store's order.
        indices: which.
        device: of the tensors.
    """
    chosen = [sequences[index] for index in indices]
    ids = [part for sequence in chosen for part in (sequence.prompt_ids, sequence.response_ids)]
    features, finals, argmax = zip(*(store[index] for index in indices), strict=True)
    return Batch(
        [sequence.tokens for sequence in chosen],
        [len(sequence.prompt_ids) for sequence in chosen],
        torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device),
        torch.cat(features).to(device, torch.float32),
        torch.cat(finals).to(device, torch.float32),
        torch.cat(argmax).to(device, torch.int64),
    )
