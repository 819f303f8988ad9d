"""Processors and warpers: each agrees with transformers' own, row by row, with the history of plain decoding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_pangu.speculation.history import Histories
from eagle_pangu.speculation.index_guard import IndexGuard
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.processors import best_tokens, best_values, likely, process
from eagle_pangu.speculation.tree import TokenTree
from tests.trees import token_trees

VOCAB = 40
BANNED = float("-inf")
Reference = Callable[[list[int], int, torch.Tensor], torch.Tensor]  # history, answer start, [vocab] -> [vocab]


@pytest.fixture(autouse=True, scope="module")
def _guard() -> Iterator[None]:
    with IndexGuard():
        yield


class Case(NamedTuple):
    """Rows of a tree over committed tokens, and their logits."""

    committed: list[int]
    answer_start: int
    tree: TokenTree
    logits: torch.Tensor

    @property
    def histories(self) -> Histories:
        return Histories.of_tree(np.asarray(self.committed), self.answer_start, self.tree)

    def history(self, row: int) -> list[int]:
        """What plain decoding has before it decides after this row."""
        path = np.flatnonzero(self.tree.mask[row])
        return self.committed + self.tree.token_ids[path].tolist()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few ids, so that histories repeat them; logits of both signs, coarse often, so that ties abound."""
    tree = draw(token_trees(max_rows=10, vocab_size=12, scored=False))
    committed = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    logits = 4 * torch.randn(tree.rows, VOCAB, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**32))))
    return Case(committed, draw(st.integers(0, len(committed))), tree, logits)


def theirs(make: Callable[[int], LogitsProcessor]) -> Reference:
    def processed(history: list[int], answer_start: int, logits: torch.Tensor) -> torch.Tensor:
        return make(answer_start)(torch.tensor([history]), logits[None].clone())[0]

    return processed


def openai(frequency: float, presence: float) -> Reference:
    """The formula of OpenAI's API reference."""

    def processed(history: list[int], answer_start: int, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        for token_id, count in Counter(history[answer_start:]).items():
            logits[token_id] -= count * frequency + presence
        return logits

    return processed


def only(*allowed: int) -> Reference:
    def processed(history: list[int], answer_start: int, logits: torch.Tensor) -> torch.Tensor:
        return torch.tensor([value if i in allowed else BANNED for i, value in enumerate(logits.tolist())])

    return processed


BAD_WORDS = ((3,), (39,), (5, 6), (1, 1), (1, 2, 3), (0, 1, 2, 3, 4), (1, 7))
BIAS = ((0, 1.5), (39, -100.0), (7, 0.25))
PROCESSORS: dict[str, tuple[SamplingParameters, Reference]] = {
    "repetition penalty": (
        SamplingParameters(repetition_penalty=1.3),
        theirs(lambda _: RepetitionPenaltyLogitsProcessor(1.3)),
    ),
    "repetition reward": (
        SamplingParameters(repetition_penalty=0.7),
        theirs(lambda _: RepetitionPenaltyLogitsProcessor(0.7)),
    ),
    "frequency penalty": (SamplingParameters(frequency_penalty=0.5), openai(0.5, 0)),
    "presence penalty": (SamplingParameters(presence_penalty=-1.25), openai(0, -1.25)),
    "both": (SamplingParameters(frequency_penalty=1.5, presence_penalty=0.5), openai(1.5, 0.5)),
    "logit bias": (
        SamplingParameters(logit_bias=BIAS),
        theirs(lambda _: SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in BIAS])),
    ),
    "bad words": (
        SamplingParameters(bad_words=BAD_WORDS),
        theirs(lambda _: NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS])),
    ),
    "allowed ids": (SamplingParameters(allowed_token_ids=(39, 2, 0)), only(0, 2, 39)),
    "min tokens": (
        SamplingParameters(min_tokens=5, end_token_ids=(0, 39)),
        theirs(lambda answer_start: MinNewTokensLengthLogitsProcessor(answer_start, 5, [0, 39])),
    ),
}
# What all of them do, in the order of the contract.
ALL = SamplingParameters(
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=-1.25,
    logit_bias=BIAS,
    bad_words=BAD_WORDS,
    allowed_token_ids=tuple(range(20)),
    min_tokens=5,
    end_token_ids=(0, 39),
)


def all_of_them(history: list[int], answer_start: int, logits: torch.Tensor) -> torch.Tensor:
    logits = PROCESSORS["repetition penalty"][1](history, answer_start, logits)
    logits = openai(0.5, -1.25)(history, answer_start, logits)
    for name in ("logit bias", "bad words"):
        logits = PROCESSORS[name][1](history, answer_start, logits)
    logits = only(*range(20))(history, answer_start, logits)
    return PROCESSORS["min tokens"][1](history, answer_start, logits)


# ---- processors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "reference"), [*PROCESSORS.values(), (ALL, all_of_them)], ids=[*PROCESSORS, "all of them"]
)
@settings(max_examples=10)
@given(case=cases())
def test_a_row_is_processed_with_the_history_of_plain_decoding(
    parameters: SamplingParameters, reference: Reference, case: Case
) -> None:
    parameters.validate(VOCAB)
    scores = process(case.logits, case.histories, parameters)
    expected = [
        reference(case.history(row), case.answer_start, logits) for row, logits in enumerate(case.logits.unbind())
    ]
    assert scores.tolist() == torch.stack(expected).tolist()


def test_nothing_on_changes_nothing() -> None:
    logits = torch.randn(1, VOCAB).bfloat16()
    histories = Histories.of_committed(np.array([1, 2, 3]), 1)
    scores = process(logits, histories, SamplingParameters())
    assert scores.dtype == torch.float32
    assert scores.tolist() == logits.tolist()


@pytest.mark.parametrize("parameters", [ALL, *(parameters for parameters, _ in PROCESSORS.values())])
def test_logits_are_left_as_they_were(parameters: SamplingParameters) -> None:
    logits = torch.randn(1, VOCAB)
    before = logits.tolist()
    process(logits, Histories.of_committed(np.array([1, 2, 3]), 1), parameters)
    assert logits.tolist() == before


def test_what_a_slice_of_wider_logits_holds_is_processed_alone() -> None:
    wide = torch.randn(1, VOCAB + 8)
    histories = Histories.of_committed(np.array([1, 2, 3]), 1)
    assert torch.equal(process(wide[:, :VOCAB], histories, ALL), process(wide[:, :VOCAB].clone(), histories, ALL))


@settings(max_examples=30)
@given(cases(), st.integers(0, 15))
def test_histories_end_and_count_as_plain_decoding_does(case: Case, length: int) -> None:
    plain = [case.history(row) for row in range(case.tree.rows)]
    histories = case.histories
    assert histories.positions.tolist() == [len(history) for history in plain]
    assert histories.endings(length) == [tuple(history[max(len(history) - length, 0) :]) for history in plain]
    token_ids, seen, counts = histories.occurrences()
    for row, history in enumerate(plain):
        assert token_ids[seen[row]].tolist() == sorted(set(history))
        assert Counter(dict(zip(token_ids.tolist(), counts[row].tolist(), strict=True))) == Counter(
            history[case.answer_start :]
        )


# ---- warpers ---------------------------------------------------------------------------------------------------------

DRAWN = SamplingParameters(temperature=1.0)
WARPERS: dict[str, tuple[SamplingParameters, list[LogitsProcessor]]] = {
    "temperature": (replace(DRAWN, temperature=0.7), [TemperatureLogitsWarper(0.7)]),
    "top-k": (replace(DRAWN, top_k=5), [TopKLogitsWarper(5)]),
    "top-k of all": (replace(DRAWN, top_k=1000), [TopKLogitsWarper(1000)]),
    "top-p": (replace(DRAWN, top_p=0.8), [TopPLogitsWarper(0.8)]),
    "tiny top-p": (replace(DRAWN, top_p=1e-9), [TopPLogitsWarper(1e-9)]),
    "min-p": (replace(DRAWN, min_p=0.1), [MinPLogitsWarper(0.1)]),
    "largest min-p": (replace(DRAWN, min_p=1.0), [MinPLogitsWarper(1.0)]),
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
    rows, token_ids, values = likely(scores, parameters)
    assert torch.equal(rows * scores.shape[1] + token_ids, (rows * scores.shape[1] + token_ids).sort().values)
    warped = torch.full_like(scores, BANNED)
    warped[rows, token_ids] = values
    return warped


@pytest.mark.parametrize("vocab", [1, 9, 40, 2000])  # 2000: sorted as a whole
@pytest.mark.parametrize(("parameters", "warpers"), WARPERS.values(), ids=WARPERS)
def test_distinct_scores_are_warped_as_transformers_does(
    parameters: SamplingParameters, warpers: list[LogitsProcessor], vocab: int
) -> None:
    scores = 3 * torch.randn(20, vocab, generator=torch.Generator().manual_seed(vocab))
    scores[:, 1::7] = BANNED
    before = scores.clone()
    expected = scores
    for warper in warpers:
        expected = warper(torch.zeros(20, 1, dtype=torch.int64), expected)
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


@pytest.mark.parametrize(("parameters", "_"), WARPERS.values(), ids=WARPERS)
def test_a_row_has_the_same_bits_alone(parameters: SamplingParameters, _: object) -> None:
    scores = (3 * torch.randn(9, 5000, generator=torch.Generator().manual_seed(1))).bfloat16().float()
    together = warp(scores, parameters)
    for row in range(9):
        assert torch.equal(warp(scores[row : row + 1], parameters)[0], together[row])


@pytest.mark.parametrize("count", [1, 50, 256, 257, 700])
def test_the_best_values_ascend(count: int) -> None:
    scores = torch.randn(3, 700, generator=torch.Generator().manual_seed(count))
    assert torch.equal(best_values(scores, count), scores.sort(dim=-1).values[:, -count:])


def test_banned_tokens_are_never_among_the_best() -> None:
    scores = torch.tensor([[BANNED, 1.0, BANNED], [2.0, BANNED, 3.0]])
    rows, ids = best_tokens(scores, best_values(scores, 2), torch.zeros(2, 1, dtype=torch.int64))
    assert (rows.tolist(), ids.tolist()) == ([0, 1, 1], [1, 0, 2])
