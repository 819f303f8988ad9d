"""The best next tokens of every row, and whose they are where sessions share a pass."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.children import NO_CHILDREN, top_children

NAN, INF = float("nan"), float("inf")


def test_ties_go_to_the_smaller_id() -> None:
    children = top_children(torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2)
    assert children.rows.tolist() == [0, 0, 1, 1]
    assert children.token_ids.tolist() == [1, 2, 0, 1]
    assert children.log_probs.dtype == np.float32


def test_what_has_no_probability_is_skipped() -> None:
    children = top_children(torch.tensor([[NAN, 1.0, 2.0], [0.0, -INF, -INF]]), 2)
    assert children.rows.tolist() == [1]
    assert children.token_ids.tolist() == [0]


def test_of_a_vocabulary_smaller_than_the_width_all_are_taken() -> None:
    assert top_children(torch.zeros(1, 3), 5).token_ids.tolist() == [0, 1, 2]


def test_half_precision_logits_still_give_float32_scores() -> None:
    children = top_children(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), 2)
    np.testing.assert_allclose(np.exp(children.log_probs).sum(), 1, rtol=1e-6)


def test_none_of_no_rows() -> None:
    for part in NO_CHILDREN.split([0, 0]):
        assert [column.size for column in part] == [0, 0, 0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_each_part_has_what_its_rows_have_on_their_own(counts: list[int], width: int, data: st.DataObject) -> None:
    values = st.sampled_from([0.0, 1.0, 2.0, 3.0, NAN])
    rows = data.draw(st.lists(st.lists(values, min_size=3, max_size=3), min_size=sum(counts), max_size=sum(counts)))
    logits = torch.tensor(rows).view(-1, 3)
    for part, own in zip(top_children(logits, width).split(counts), torch.split(logits, counts), strict=True):
        expected = top_children(own, width)
        assert part.rows.tolist() == expected.rows.tolist()
        assert part.token_ids.tolist() == expected.token_ids.tolist()
        assert part.log_probs.tolist() == expected.log_probs.tolist()
