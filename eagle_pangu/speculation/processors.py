"""What a request may do to logits before a token is decided, row by row with each row's own history.

`process` penalises, biases and bans, as transformers' logits processors do: a pure function of logits, histories and
parameters, in float32 on the logits' device. A row's result has the same bits whatever rows stand beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.history import Histories
from eagle_pangu.speculation.indexing import copy_into, fill, index_tensor, select
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
    vocab_size, device = scores.shape[1], scores.device
    if parameters.penalises:
        _penalise(scores, histories, parameters)
    if parameters.logit_bias:
        token_ids, biases = zip(*parameters.logit_bias, strict=True)
        biased = index_tensor(token_ids, vocab_size, device, field="logit_bias")
        copy_into(scores, 1, biased, select(scores, 1, biased) + torch.tensor(biases, device=device))
    banned = _banned(histories, parameters, vocab_size)
    fill(scores.view(-1), 0, index_tensor(banned, scores.numel(), device, field="banned ids"), _BANNED)
    if parameters.allowed_token_ids:
        allowed = index_tensor(parameters.allowed, vocab_size, device, field="allowed_token_ids")
        kept = select(scores, 1, allowed)
        copy_into(scores.fill_(_BANNED), 1, allowed, kept)
    return scores


def _penalise(scores: torch.Tensor, histories: Histories, parameters: SamplingParameters) -> None:
    """Repetition penalty (Keskar et al., "CTRL", 2019), then frequency and presence penalty as in OpenAI's API."""
    occurrences = histories.occurrences()
    token_ids = index_tensor(occurrences.token_ids, scores.shape[1], scores.device, field="history")
    seen, counts = (
        torch.from_numpy(table).to(scores.device) for table in (occurrences.seen, occurrences.answer_counts)
    )
    values = select(scores, 1, token_ids)
    penalty = parameters.repetition_penalty
    values = torch.where(seen, torch.where(values < 0, values * penalty, values / penalty), values)
    values -= counts * parameters.frequency_penalty + (counts > 0) * parameters.presence_penalty
    copy_into(scores, 1, token_ids, values)


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
