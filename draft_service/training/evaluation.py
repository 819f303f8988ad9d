"""How often a head is right on held-out answers, step by step, and the tokens per round that a chain would then give.

Teacher-forced: every step reads the true token, so step k is asked what it would say had all before it been accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

import torch

from draft_service.training.batches import Batch
from draft_service.training.unroll import plan_steps, unroll
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from eagle_pangu.speculation.indexing import select


@torch.inference_mode()
def acceptance(head: Eagle3Head, batches: Iterable[Batch], steps: int) -> list[float]:
    """Share of answer tokens where the head's best id is the teacher's, for each step, 0 .. 1.

    Where the teacher's id is outside the draft vocabulary the head misses.
    """
    hits, asked = [0] * steps, [0] * steps
    for batch in batches:
        plan = plan_steps(batch.lengths, batch.prompts, steps, batch.token_ids.device)
        for index, (output, step) in enumerate(
            zip(unroll(head, batch.token_ids, batch.features, plan), plan, strict=True)
        ):
            best = select(head.target_ids, 0, head.logits(output).argmax(dim=-1))
            hits[index] += int((best == select(batch.argmax, 0, step.answers)).sum())
            asked[index] += len(best)
    return [hit / max(1, total) for hit, total in zip(hits, asked, strict=True)]


def chain_tokens_per_round(acceptances: Sequence[float]) -> float:
    """Tokens per round of a chain as deep as the steps: 1 + a0 + a0 a1 + ..., the steps taken as independent."""
    accepted: list[float] = list(accumulate(acceptances, mul))
    return 1.0 + sum(accepted)
