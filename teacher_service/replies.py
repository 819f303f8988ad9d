"""What a session replies: plain values, which `messages` puts on the wire."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.sampling import LogProbabilities


class FeatureRows(NamedTuple):
    """Features of consecutive tokens: position of the first, and [count, feature_width] bits of bfloat16."""

    start: int
    bits: NDArray[np.uint16]


class PromptLogprobs(NamedTuple):
    """Of consecutive prompt tokens, each as the tokens before it let expect; `start` is the first one's position."""

    start: int
    found: LogProbabilities


class FirstToken(NamedTuple):
    """What prefill decided: the first answer token, its top-2 margin, in logits, and log-probabilities when wanted."""

    token_id: int
    margin: float
    logprobs: LogProbabilities | None


class Chunk(NamedTuple):
    """One prefill step.

    features: of its tokens, when wanted; in the first step with those of reused tokens before them. prompt_logprobs:
    when wanted, of the prompt tokens that its rows let expect; None where there is none of these. first_token: after
    the last chunk.
    """

    features: FeatureRows | None
    prompt_logprobs: PromptLogprobs | None
    first_token: FirstToken | None


class Verdict(NamedTuple):
    """The teacher's answer to a round.

    accepted_rows: in path order, root left out. next_token_id: the token after the last of them.
    margins: [accepted + 1] float32, in logits. features: of the root and the accepted rows, when wanted. logprobs: of
    the accepted tokens and the next one, when wanted.
    """

    round: int
    accepted_rows: list[int]
    next_token_id: int
    margins: NDArray[np.float32]
    features: FeatureRows | None
    logprobs: LogProbabilities | None
