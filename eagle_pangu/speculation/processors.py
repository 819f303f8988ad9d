"""What a request may do to logits before a token is decided, row by row with each row's own history.

`process` penalises, biases and bans, as transformers' logits processors do; `likely` says what is sampled from, as its
warpers do. Pure functions of logits, histories and parameters, in float32 on the logits' device; no noise, no session.
A row's result has the same bits whatever rows stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.history import Histories
from eagle_pangu.speculation.parameters import SamplingParameters

_BANNED = float("-inf")


def process(logits: torch.Tensor, histories: Histories, parameters: SamplingParameters) -> torch.Tensor:
    """Penalise, bias and ban.

    Args:
        logits: [rows, vocab]; left as they are.
        histories: of the same rows.
        parameters: valid for this vocabulary.

    Returns:
        [rows, vocab] float32, -inf where a token is banned.
    """
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if parameters.penalises:
        _penalise(scores, histories, parameters)
    if parameters.logit_bias:
        biased, bias = zip(*parameters.logit_bias, strict=True)
        scores[:, _ids(biased, scores)] += torch.tensor(bias, device=scores.device)
    banned = torch.from_numpy(_banned(histories, parameters, scores.shape[1])).to(scores.device)
    scores.view(-1).index_fill_(0, banned, _BANNED)
    if parameters.allowed_token_ids:
        allowed = torch.from_numpy(parameters.allowed).to(scores.device)
        kept = scores.index_select(1, allowed)
        scores.fill_(_BANNED).index_copy_(1, allowed, kept)
    return scores


class Likely(NamedTuple):
    """Tokens that are left to sample from: rows and token_ids, [found] int64 each, by row and in a row by id; values,
    [found] float32, their scores."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


def likely(scores: torch.Tensor, parameters: SamplingParameters) -> Likely:
    """What top-k, top-p and min-p leave, in this order; always the best token of each row.

    Args:
        scores: [rows, vocab] float32, divided by the temperature, at least one finite in each row; left as they are.
        parameters: that truncate.
    """
    if parameters.min_p > 0:
        least = scores.amax(dim=-1, keepdim=True) + math.log(parameters.min_p)
        if not parameters.top_k and parameters.top_p == 1:
            return _found(scores, *marked(scores >= least))
    rows, vocab = scores.shape
    width = min(parameters.top_k, vocab) or vocab
    best = best_values(scores, width)
    cut = torch.zeros((rows, 1), dtype=torch.int64, device=scores.device)
    if parameters.top_p < 1:
        mass = best.softmax(dim=-1).cumsum(dim=-1)
        rest = torch.full((rows, 1), 1 - parameters.top_p, device=scores.device)
        cut = torch.searchsorted(mass, rest, right=True).clamp(max=width - 1)
    found = _found(scores, *best_tokens(scores, best, cut))
    if parameters.min_p == 0:
        return found
    kept = found.values >= least[found.rows, 0]
    return Likely(*(each[kept] for each in found))


def _found(scores: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> Likely:
    return Likely(rows, token_ids, scores[rows, token_ids])


def best_values(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] the highest of [rows, vocab] scores, ascending."""
    if count <= 256 or scores.device.type != "cpu":
        return scores.topk(count, dim=-1).values.flip(-1)
    # On a CPU torch carries ids along when it sorts; NumPy sorts plain floats ten times as fast.
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1))[:, -count:].contiguous()


def marked(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and ids, [found] int64 each, where a [rows, vocab] mask is true, by row and in a row by id."""
    if mask.device.type != "cpu":
        rows, ids = mask.nonzero(as_tuple=True)
        return rows, ids
    flat = torch.from_numpy(np.flatnonzero(mask.numpy()))  # several times as fast as torch's
    return flat // mask.shape[1], flat % mask.shape[1]


def best_tokens(scores: torch.Tensor, best: torch.Tensor, cut: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the best scores stand; of equal ones, at the smaller ids. Banned tokens are never among them.

    Args:
        scores: [rows, vocab].
        best: [rows, width] their `best_values`.
        cut: [rows, 1] int64 below width, how many of these, from the lowest on, to leave out.

    Returns:
        rows and ids, [found] int64 each, by row and in a row by id.
    """
    lowest = best.gather(1, cut).clamp(min=torch.finfo(best.dtype).min)
    room = torch.searchsorted(best, lowest, right=True) - cut  # how many of the tokens at the lowest score get in
    rows, ids = marked(scores >= lowest)
    tied = scores[rows, ids] == lowest[rows, 0]
    per_row = torch.bincount(rows[tied], minlength=len(scores))
    rank = tied.cumsum(0) - (per_row.cumsum(0) - per_row)[rows]  # among the ties of its own row, from 1
    kept = ~tied | (rank <= room[rows, 0])
    return rows[kept], ids[kept]


def _penalise(scores: torch.Tensor, histories: Histories, parameters: SamplingParameters) -> None:
    """Repetition penalty (Keskar et al., "CTRL", 2019), then frequency and presence penalty as in OpenAI's API."""
    occurrences = histories.occurrences()
    token_ids, seen, counts = (torch.from_numpy(table).to(scores.device) for table in occurrences)
    values = scores[:, token_ids]
    penalty = parameters.repetition_penalty
    values = torch.where(seen, torch.where(values < 0, values * penalty, values / penalty), values)
    values -= counts * parameters.frequency_penalty + (counts > 0) * parameters.presence_penalty
    scores[:, token_ids] = values


def _banned(histories: Histories, parameters: SamplingParameters, vocab: int) -> NDArray[np.int64]:
    """Flat indices into [rows, vocab]: what would complete a bad word, or end the answer too early."""
    ends = parameters.bad_word_ends
    lengths = sorted({len(start) for start in ends})
    banned: list[int] = []
    endings = histories.endings(max(lengths, default=0))
    for row, (ending, answered) in enumerate(zip(endings, histories.answer_lengths.tolist(), strict=True)):
        starts = (ending[len(ending) - length :] for length in lengths if length <= len(ending))
        token_ids = [token_id for start in starts for token_id in ends.get(start, ())]
        if answered < parameters.min_tokens:
            token_ids += parameters.end_token_ids
        banned += (row * vocab + token_id for token_id in token_ids)
    return np.asarray(banned, dtype=np.int64)


def _ids(token_ids: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=scores.device)
