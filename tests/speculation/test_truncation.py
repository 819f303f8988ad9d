"""What is left to sample from: as transformers' warpers leave it, and as sorting the whole row would."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_pangu.speculation import truncation
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.truncation import likely

BANNED = float("-inf")
DRAWN = SamplingParameters(temperature=1.0)
WARPERS: dict[str, tuple[SamplingParameters, list[LogitsProcessor]]] = {
    "temperature": (replace(DRAWN, temperature=0.7), [TemperatureLogitsWarper(0.7)]),
    "top-k": (replace(DRAWN, top_k=5), [TopKLogitsWarper(5)]),
    "top-k of all": (replace(DRAWN, top_k=1000), [TopKLogitsWarper(1000)]),
    "top-p": (replace(DRAWN, top_p=0.8), [TopPLogitsWarper(0.8)]),
    "tiny top-p": (replace(DRAWN, top_p=1e-9), [TopPLogitsWarper(1e-9)]),
    "min-p": (replace(DRAWN, min_p=0.1), [MinPLogitsWarper(0.1)]),
    "largest min-p": (replace(DRAWN, min_p=1.0), [MinPLogitsWarper(1.0)]),
    "top-p and min-p": (replace(DRAWN, top_p=0.95, min_p=0.01), [TopPLogitsWarper(0.95), MinPLogitsWarper(0.01)]),
    "top-k and top-p": (replace(DRAWN, top_k=300, top_p=0.95), [TopKLogitsWarper(300), TopPLogitsWarper(0.95)]),
    "all": (
        SamplingParameters(temperature=1.6, top_k=9, top_p=0.9, min_p=0.05),
        [TemperatureLogitsWarper(1.6), TopKLogitsWarper(9), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
    ),
}


def warp(scores: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """[rows, vocab] as warpers give them: -inf at what is not sampled from."""
    scores = scores / parameters.temperature
    if not parameters.truncates:
        return scores
    warped = torch.full_like(scores, BANNED)
    for row, own in enumerate(scores):
        token_ids = torch.from_numpy(likely(own.numpy(), parameters))
        assert torch.equal(token_ids, token_ids.unique())
        warped[row, token_ids] = own[token_ids]
    return warped


@pytest.mark.parametrize("spread", [0.5, 3.0])  # so that the best hundreds hold top_p, or thousands
@pytest.mark.parametrize("vocab", [1, 9, 40, 2000, 20_000])
@pytest.mark.parametrize(("parameters", "warpers"), WARPERS.values(), ids=WARPERS)
def test_distinct_scores_are_warped_as_transformers_does(
    parameters: SamplingParameters, warpers: list[LogitsProcessor], vocab: int, spread: float
) -> None:
    scores = spread * torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab))
    scores[:, 1::7] = BANNED
    before = scores.clone()
    expected = scores
    for warper in warpers:
        expected = warper(torch.zeros(9, 1, dtype=torch.int64), expected)
    assert torch.equal(warp(scores, parameters), expected)
    assert torch.equal(scores, before)


def plainly_warped(scores: list[float], parameters: SamplingParameters) -> list[float]:
    """Best first, ties by smaller id: the fewest that the rules ask for."""
    alive = sorted((i for i, score in enumerate(scores) if score > BANNED), key=lambda i: (-scores[i], i))
    alive = alive[: parameters.top_k or None]
    weights = [math.exp(scores[i] - scores[alive[0]]) for i in alive]
    mass, kept = 0.0, []
    for token_id, weight in zip(alive, weights, strict=True):
        if mass < parameters.top_p and weight >= parameters.min_p:
            kept.append(token_id)
        mass += weight / sum(weights)
    return [score if i in kept else BANNED for i, score in enumerate(scores)]


@given(
    st.lists(st.lists(st.sampled_from([BANNED, 0.0, 0.5, 1.0, 3.0]), min_size=12, max_size=12), min_size=1, max_size=4),
    st.sampled_from([0, 1, 3, 11, 12, 50]),
    st.sampled_from([1.0, 0.913, 0.5, 0.017]),
    st.sampled_from([0.0, 0.07, 0.51, 1.0]),
)
def test_of_equal_scores_the_smaller_ids_are_kept(
    scores: list[list[float]], top_k: int, top_p: float, min_p: float
) -> None:
    for row in scores:
        row[5] = 1.0  # one at least is not banned
    parameters = replace(DRAWN, top_k=top_k, top_p=top_p, min_p=min_p)
    assert warp(torch.tensor(scores), parameters).tolist() == [plainly_warped(row, parameters) for row in scores]


def sorted_as_a_whole(scores: NDArray[np.float32], parameters: SamplingParameters) -> list[int]:
    """By the same arithmetic, but over all of the row."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    order = order[scores[order] > BANNED][: parameters.top_k or None]
    weights = np.exp(scores[order] - scores[order[0]])
    above = weights.cumsum(dtype=np.float64)
    whole = above[-1] if parameters.top_k else np.exp(scores - scores.max()).sum(dtype=np.float64)
    kept = order[: int((above < parameters.top_p * whole).sum()) + 1]
    return sorted(kept[scores[kept] >= scores.max() + np.float32(math.log(parameters.min_p or 1e-37))].tolist())


@pytest.mark.parametrize("first", [1, 5, 256])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.95, 0.999, 1 - 2**-24, 1.0])
def test_the_best_part_decides_as_the_whole_row_would(
    top_p: float, spread: float, coarse: bool, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the part that is tried first, with ties in plenty and without, and in any combination."""
    monkeypatch.setattr(truncation, "FIRST_PART", first)
    generator = torch.Generator().manual_seed(int(1000 * spread))
    for vocab, top_k, min_p in ((3, 0, 0.0), (700, 300, 0.0), (9000, 0, 0.0), (9000, 0, 0.01), (9000, 4000, 1e-6)):
        scores = spread * torch.randn(vocab, generator=generator)
        scores = (scores.bfloat16().float() if coarse else scores).index_fill(0, torch.tensor([1]), BANNED)
        parameters = replace(DRAWN, top_k=top_k, top_p=top_p, min_p=min_p)
        if parameters.truncates:
            assert likely(scores.numpy(), parameters).tolist() == sorted_as_a_whole(scores.numpy(), parameters)


@pytest.mark.parametrize(("top_p", "left"), [(0.25, 1), (0.5, 2), (0.50001, 3), (0.75, 3), (0.99, 4)])
def test_the_token_that_reaches_top_p_exactly_is_the_last_one_left(top_p: float, left: int) -> None:
    scores = torch.tensor([0.0, 0.0, 0.0, 0.0, BANNED])
    assert likely(scores.numpy(), replace(DRAWN, top_p=top_p)).tolist() == list(range(left))
    theirs = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.int64), scores[None])[0]
    assert (theirs > BANNED).sum() == left


def test_banned_tokens_are_never_left() -> None:
    scores = np.array([BANNED, 1.0, BANNED, 0.5], dtype=np.float32)
    for parameters in (replace(DRAWN, top_k=3), replace(DRAWN, top_p=0.9999), replace(DRAWN, min_p=1e-30)):
        assert likely(scores, parameters).tolist() == [1, 3]
