"""Stage 2: which of the teacher's ids the head can propose: the frequent ones of its answers, and those it must have.

Pure: counts in, ids out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from draft_service.training.settings import TrainingError
from eagle_pangu.speculation.checkpoints import Tokenizer


def choose_vocabulary(
    responses: Iterable[NDArray[np.int32]], forced: Sequence[int], *, size: int, vocab_size: int
) -> NDArray[np.int64]:
    """The ids of a draft vocabulary.

    The forced ids come first, then the most frequent ids of the responses (ties by id), then the lowest unused ids.

    Args:
        responses: of the training part.
        forced: ids that must be in.
        size: ids wanted, at most `vocab_size`.
        vocab_size: ids are below it.

    Returns:
        [size] teacher ids, ascending.

    Raises:
        TrainingError: `size` holds fewer ids than are forced.
    """
    if size < len(set(forced)):
        raise TrainingError(f"--draft-vocab: expected at least {len(set(forced))}, the ids that must be in, got {size}")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for response in responses:
        counts += np.bincount(response, minlength=vocab_size)
    counts[list(forced)] = counts.max(initial=0) + 1
    best = np.argsort(-counts, kind="stable")[:size]  # ids never seen have count 0, so the lowest of them follow
    return np.sort(best)


def forced_ids(eos_token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Ids that a head must have, however rare: what ends an answer, and the special ids of the chat template."""
    return sorted({*eos_token_ids, *_template_ids(tokenizer)})


def _template_ids(tokenizer: Tokenizer) -> set[int]:
    """Special tokens that the template writes out, or uses by name (`eos_token`)."""
    template = tokenizer.chat_template
    named = {text for name, text in tokenizer.special_tokens.items() if name in template}
    added = json.loads(tokenizer.json).get("added_tokens") or []
    return {
        token["id"]
        for token in added
        if token.get("special") and (token["content"] in template or token["content"] in named)
    }


def coverage(responses: Iterable[NDArray[np.int32]], vocabulary: NDArray[np.int64]) -> float:
    """Share of the responses' tokens that are in the vocabulary, 0 .. 1; 0 where there is no token."""
    tokens = np.concatenate([np.zeros(0, dtype=np.int32), *responses])
    return float(np.isin(tokens, vocabulary).mean()) if len(tokens) else 0.0
