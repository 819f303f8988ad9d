"""Which answers of a run are held out, which are trained on, and in what order. Pure functions of the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draft_service.training.answers import Answer
from draft_service.training.settings import TrainingError

HELD_OUT_SHARE = 0.05
MOST_HELD_OUT_TOKENS = 50_000
"""More would take time after every epoch and tell little more."""


@dataclass(frozen=True)
class Corpus:
    """Answers by what they are for.

    Attributes:
        held_out: never trained on, nor counted for the vocabulary.
        train: trained on.
        counted: trained on or left out for want of room; the vocabulary is counted over them.
    """

    held_out: list[Answer]
    train: list[Answer]
    counted: list[Answer]

    @property
    def sequences(self) -> list[Answer]:
        """All whose features are wanted, in the order in which they are stored."""
        return self.held_out + self.train


def split(answers: Sequence[Answer], *, max_tokens: int, seed: int) -> Corpus:
    """Divide answers into a held-out and a training part, whole conversations at a time.

    Conversations are shuffled and taken while they fit `max_tokens`; of these the first `HELD_OUT_SHARE`, at least one
    conversation and at most `MOST_HELD_OUT_TOKENS` beyond it, are held out.

    Raises:
        TrainingError: fewer than two conversations fit.
    """
    conversations: dict[str, list[Answer]] = {}
    for answer in answers:
        conversations.setdefault(answer.conversation, []).append(answer)
    names = list(conversations)
    shuffled = [conversations[names[place]] for place in np.random.default_rng(seed).permutation(len(names))]
    sizes = np.cumsum([sum(answer.tokens for answer in conversation) for conversation in shuffled])
    fitting = int(np.searchsorted(sizes, max_tokens, side="right"))
    if fitting < 2:
        raise TrainingError(
            f"--max-tokens: expected room for two conversations at least, one of them held out; {max_tokens} tokens "
            f"hold {fitting} of {len(shuffled)}"
        )
    bound = min(HELD_OUT_SHARE * sizes[fitting - 1], MOST_HELD_OUT_TOKENS)
    held_out = max(1, int(np.searchsorted(sizes[: fitting - 1], bound, side="right")))
    return Corpus(
        held_out=_flat(shuffled[:held_out]),
        train=_flat(shuffled[held_out:fitting]),
        counted=_flat(shuffled[held_out:]),
    )


def epoch_batches(lengths: Sequence[int], *, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch's order: every sequence once, shuffled, in batches of at most `batch_tokens` tokens.

    Args:
        lengths: tokens of each sequence; one that is longer than a batch is a batch of its own.
        batch_tokens: most tokens of a batch.
        seed, epoch: of the order.

    Returns:
        indices of sequences, batch by batch.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist()
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def _flat(conversations: Sequence[Sequence[Answer]]) -> list[Answer]:
    return [answer for conversation in conversations for answer in conversation]
