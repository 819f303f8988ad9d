"""Greedy choice: the arg-max, the smallest id on ties, and the margin to the runner-up."""

from __future__ import annotations

import pytest
import torch

from eagle_pangu.speculation.sampling import greedy


def test_greedy_takes_the_highest_logit_and_its_margin() -> None:
    choice = greedy(torch.tensor([[0.0, 3.0, 1.0], [5.0, 2.0, 4.5]]))
    assert choice.token_ids.tolist() == [1, 0]
    assert choice.margins.tolist() == [2.0, 0.5]


def test_a_tie_goes_to_the_smallest_id_with_margin_zero() -> None:
    choice = greedy(torch.tensor([[1.0, 7.0, 7.0, 7.0]], dtype=torch.bfloat16))
    assert choice.token_ids.tolist() == [1]
    assert choice.margins.tolist() == [0.0]


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 1000, 49152])
def test_any_vocabulary_agrees_with_the_plain_definition(vocab: int) -> None:
    # Coarse values, so that ties abound, within a piece and across pieces.
    logits = torch.randint(0, 50 * vocab, (33, vocab), generator=torch.Generator().manual_seed(vocab)) // 40
    logits = logits.float()
    choice = greedy(logits)
    assert choice.token_ids.tolist() == logits.argmax(dim=-1).tolist()
    if vocab > 1:
        highest = logits.topk(2, dim=-1).values
        assert choice.margins.tolist() == (highest[:, 0] - highest[:, 1]).tolist()


def test_a_tie_far_away_goes_to_the_smallest_id() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, [300, 1500]] = 1.0
    assert greedy(logits).token_ids.tolist() == [300]
    assert greedy(logits).margins.tolist() == [0.0]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    greedy(logits)
    assert logits.tolist() == [[0.0, 3.0, 1.0]]
