"""The training-time test of EAGLE-3 (arXiv 2503.01840): a head unrolled over its own output, and its loss.

Row t of a sequence x, at step k = 0 .. K - 1, reads the embedding of the true token x[t + 1 + k] and a hidden state:
the teacher's fused features of token t at step 0, the head's own output of row t at step k - 1 after that. It stands at
position t + k, sees the keys of step 0 at 0 .. t and those of steps 1 .. k at t, and predicts x[t + 2 + k]. It is so in
drafting: keys of decided tokens come from the teacher's features, those of a branch from the head.

Sequences lie one after another, without padding; attention alone takes them apart. From step 1 on, only rows that some
step predicts an answer token from are computed. No file, no optimiser and no clock here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from eagle_pangu.speculation.eagle3.head import Eagle3Head
from eagle_pangu.speculation.indexing import index_tensor, select

STEP_WEIGHT = 0.8
"""Weight of step k is its k-th power."""


class Span(NamedTuple):
    """Rows first .. first + rows - 1 (t) of one sequence."""

    first: int
    rows: int


class Step(NamedTuple):
    """One step over a batch; flat indices run over the sequences one after another.

    spans: rows of each sequence. kept: [rows] int64, the same rows in the step before (at step 0: in the tokens).
    inputs: [rows] int64, the token that each row reads. positions: [rows] int64. predicting: [predicted] int64, the
    rows that predict an answer token. answers: [predicted] int64, which one, over the batch's answer tokens.
    """

    spans: list[Span]
    kept: torch.Tensor
    inputs: torch.Tensor
    positions: torch.Tensor
    predicting: torch.Tensor
    answers: torch.Tensor


def plan_steps(lengths: Sequence[int], prompts: Sequence[int], steps: int, device: torch.device) -> list[Step]:
    """Which rows each step computes.

    Args:
        lengths: tokens of each sequence.
        prompts: tokens of its prompt, >= 1; the rest is the answer.
        steps: K.
        device: of the indices.
    """
    tokens = [0, *accumulate(lengths)]
    answers = [0, *accumulate(length - prompt for length, prompt in zip(lengths, prompts, strict=True))]
    before = [Span(0, length) for length in lengths]
    plan = []
    for step in range(steps):
        spans = [_span(length, prompt, step, steps) for length, prompt in zip(lengths, prompts, strict=True)]
        offsets = [0, *accumulate(span.rows for span in before)]
        kept, inputs, positions, predicted = [], [], [], []
        for index, span in enumerate(spans):
            rows = np.arange(span.first, span.first + span.rows)
            kept.append(offsets[index] + rows - before[index].first)
            inputs.append(tokens[index] + rows + 1 + step)
            positions.append(rows + step)
            # Counted from the first answer token; below 0 the row predicts a token of the prompt.
            place = rows + 2 + step - prompts[index]
            predicted.append(np.where(place >= 0, answers[index] + place, -1))
        flat = np.concatenate(predicted)
        plan.append(
            Step(
                spans,
                index_tensor(np.concatenate(kept), offsets[-1], device, field="kept"),
                index_tensor(np.concatenate(inputs), tokens[-1], device, field="inputs"),
                torch.from_numpy(np.concatenate(positions)).to(device),
                index_tensor(np.flatnonzero(flat >= 0), len(flat), device, field="predicting"),
                index_tensor(flat[flat >= 0], answers[-1], device, field="answers"),
            )
        )
        before = spans
    return plan


def _span(length: int, prompt: int, step: int, steps: int) -> Span:
    """Rows whose predicted token exists; past step 0, which gives the keys, only those that lead to an answer."""
    first = max(0, prompt - 1 - steps) if step else 0
    return Span(first, max(0, length - 2 - step - first))


def unroll(
    head: Eagle3Head, token_ids: torch.Tensor, features: torch.Tensor, plan: Sequence[Step]
) -> Iterator[torch.Tensor]:
    """The head's output where each step predicts an answer token.

    Args:
        head: any variant.
        token_ids: [tokens] int64 of the batch.
        features: [tokens, 3 * target_hidden_size].
        plan: of the same batch.

    Yields:
        [predicted, hidden_size] of each step, for `Eagle3Head.logits`, in the order of `Step.answers`.
    """
    attention = _Attention(plan)
    hidden = head.fuse(features)
    for step in plan:
        inputs, kept = select(token_ids, 0, step.inputs), select(hidden, 0, step.kept)
        output = head.step(inputs[None], kept[None], step.positions[None], attention)[0]
        yield select(output, 0, step.predicting)
        hidden = head.recycled(output)


class _Attention:
    """`Attend` over a batch of unpadded sequences, called once a step."""

    def __init__(self, plan: Sequence[Step]) -> None:
        self._plan = plan
        self._seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # step by step, sequence by sequence

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        spans = self._plan[len(self._seen)].spans
        sizes = [span.rows for span in spans]
        queries, keys, values = (torch.split(tensor[0], sizes, dim=1) for tensor in (query, key, value))
        self._seen.append(list(zip(keys, values, strict=True)))
        attended = [
            attend(queries[index], *self._seen[0][index], [step[index] for step in self._seen[1:]], span.first)
            for index, span in enumerate(spans)
        ]
        return torch.cat(attended, dim=1)[None]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
    first: int,
) -> torch.Tensor:
    """Attention of one sequence's rows at one step.

    Args:
        query: [heads, rows, head_dim] of rows first ...
        key, value: [kv_heads, columns, head_dim] of step 0 from row 0 on; row t sees columns 0 .. t.
        own: key and value of each step after it, this one included, from row `first` on; row t sees that of row t.
            Earlier steps have more rows at their end.
        first: row of the first query.

    Returns:
        as query.
    """
    heads, rows, head_dim = query.shape
    kv_heads, columns, _ = key.shape
    group = heads // kv_heads
    grouped = query.reshape(kv_heads, group, rows, head_dim) * head_dim**-0.5
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu(first + 1)
    before = (grouped.flatten(1, 2) @ key.transpose(1, 2)).view(kv_heads, group, rows, columns)
    scores = [before.masked_fill_(hidden, -torch.inf)]
    scores += [(grouped * own_key[:, None, :rows]).sum(-1, keepdim=True) for own_key, _ in own]
    weights = torch.cat(scores, dim=-1).softmax(dim=-1).to(value.dtype)
    attended = (weights[..., :columns].flatten(1, 2) @ value).view(kv_heads, group, rows, head_dim)
    for place, (_, own_value) in enumerate(own, start=columns):
        attended = attended + weights[..., place : place + 1] * own_value[:, None, :rows]
    return attended.flatten(0, 1)


def distillation_loss(
    head: Eagle3Head, outputs: Iterator[torch.Tensor], plan: Sequence[Step], targets: torch.Tensor, usable: torch.Tensor
) -> torch.Tensor:
    """The loss of a batch: sum over steps of ``STEP_WEIGHT ** k`` times the mean soft cross-entropy of step k.

    Args:
        head: for its logits.
        outputs: of `unroll`.
        plan: of the same batch.
        targets: [answers, draft_vocab_size], the teacher's distribution of each answer token over the draft vocabulary.
        usable: [answers] bool; the others count for nothing: the teacher's own choice is outside the draft vocabulary.

    Returns:
        scalar float32; 0 where no row counts.
    """
    loss = torch.zeros((), device=targets.device)
    for power, (output, step) in enumerate(zip(outputs, plan, strict=True)):
        chosen = select(usable, 0, step.answers).nonzero().flatten()
        if len(chosen):
            logits = head.logits(select(output, 0, chosen)).float()
            expected = select(targets, 0, select(step.answers, 0, chosen))
            loss = loss + STEP_WEIGHT**power * F.cross_entropy(logits, expected)
    return loss
