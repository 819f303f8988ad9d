"""Processors: each agrees with transformers' own, row by row, with the history of plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from eagle_pangu.speculation.history import Histories
from eagle_pangu.speculation.index_guard import IndexGuard
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.processors import process
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
    return theirs(lambda _: PrefixConstrainedLogitsProcessor(lambda _row, _history: list(allowed), num_beams=1))


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
