"""Greedy choice: the arg-max, the smallest id on ties, and the margin to the runner-up."""

from __future__ import annotations

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


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    greedy(logits)
    assert logits.tolist() == [[0.0, 3.0, 1.0]]
