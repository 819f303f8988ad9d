"""Requests that mix everything that a request may ask of the tokens, made from a number."""

from __future__ import annotations

import random
from typing import Any

from protos.v1 import generation_pb2, sampling_pb2
from tests.conformance.systems import LETTERS, options

DRAFTERS = ("none", "ngram", "standalone", "eagle3", "hybrid")


def mixture(number: int, tokens: int = 4, *, seeded: bool = False) -> generation_pb2.GenerationOptions:
    """Request `number`; always the same one, of at most so many tokens, without a drafter.

    Greedy every fifth time, unless all are to be seeded.
    """
    chance = random.Random(number)
    fields: dict[str, Any] = {"max_tokens": chance.randint(2, tokens), "budget": (chance.randint(1, 6), 3)}
    if seeded or number % 5:
        fields |= {"temperature": chance.choice([0.3, 0.7, 1.0, 1.5]), "seed": chance.randrange(2**64)}
    wishes: list[dict[str, Any]] = [
        {"top_k": chance.choice([1, 3, 40])},
        {"top_p": chance.choice([0.2, 0.9])},
        {"min_p": 0.05},
        {"repetition_penalty": chance.choice([0.8, 1.3])},
        {"frequency_penalty": chance.choice([-0.5, 1.0]), "presence_penalty": 0.5},
        {"logit_bias": {LETTERS[0]: 4.0, LETTERS[1]: 3.5, 257: 3.0}, "min_tokens": 3},
        {"allowed_token_ids": LETTERS, "bad_words": [sampling_pb2.TokenSequence(token_ids=[LETTERS[4]])]},
        {"allowed_token_ids": LETTERS[:4], "stop": ["ab", "c"], "include_stop": bool(number % 2)},
        {"stop_token_ids": LETTERS[2:9], "ignore_eos": True},
        {"logprobs": 2, "return_margins": True},
    ]
    for wish in chance.sample(wishes, 3):
        fields |= wish
    # A prompt that repeats itself gives the look-up something to find.
    word = [chance.randrange(256) for _ in range(chance.randint(1, 5))]
    return options(word * chance.randint(1, 4), **fields)


def assert_same_answer(answer: generation_pb2.GenerateResponse, plain: generation_pb2.GenerateResponse) -> None:
    """Everything that must not depend on the draft or on company; logits to 1e-3."""
    assert answer.token_ids == plain.token_ids
    for name in ("text", "finish_reason", "matched_stop", "seed"):
        assert getattr(answer, name) == getattr(plain, name), name
    for name in ("prompt_tokens", "completion_tokens"):
        assert getattr(answer.usage, name) == getattr(plain.usage, name), name
    assert len(answer.margins) == len(plain.margins)
    # Infinite where one token alone was left.
    assert all(
        one == other or abs(one - other) < 1e-3 for one, other in zip(answer.margins, plain.margins, strict=True)
    )
    assert_same_logprobs(answer.logprobs, plain.logprobs)


def assert_same_logprobs(ours: Any, theirs: Any) -> None:
    """Of two lists of TokenLogprobs."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.top_token_ids == other.top_token_ids
        pairs = [(one.logprob, other.logprob), *zip(one.top_logprobs, other.top_logprobs, strict=True)]
        assert all(abs(mine - yours) < 1e-3 for mine, yours in pairs)
        assert (one.token, one.top_tokens) == (other.token, other.top_tokens)
