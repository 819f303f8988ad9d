"""What a request may do to logits before a token is decided, row by row with each row's own history.

`process` penalises, biases and bans, as transformers' logits processors do: a pure function of logits, histories and
parameters, in float32 on the logits' device. A row's result has the same bits whatever rows stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

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
