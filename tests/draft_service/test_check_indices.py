"""`draft.check_indices`: passes of the head run under the index guard."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from draft_service.drafters import head_engine
from draft_service.drafters.head_engine import HeadEngine, HeadRequest
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from eagle_pangu.speculation.index_guard import IllegalIndexError
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.heads import FEATURES, VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def index_watch() -> None:
    """Off: here the head's own guard is what refuses."""


@pytest.mark.parametrize("checked", [False, True])
def test_a_negative_index_is_refused_where_torch_would_wrap_it(
    head: Eagle3Head, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    options = {"vocab_size": VOCAB_SIZE, "slot_capacity": 128, "window": 0}
    engine = HeadEngine(deepcopy(head), get_device("cpu"), **options, check_indices=checked)
    request = HeadRequest(Segment(engine.open_slot(), TokenTree.build([1, 2, 3], [0, 0, 1])), FEATURES[:3])
    expected = engine.run([request], 2)[0].children
    top_children = head_engine.top_children

    def of_the_last_row_by_minus_one(logits: torch.Tensor, width: int) -> object:
        return top_children(logits[torch.tensor([0, 1, -1])], width)

    monkeypatch.setattr(head_engine, "top_children", of_the_last_row_by_minus_one)
    if checked:
        with pytest.raises(IllegalIndexError, match=r"aten\.index\.Tensor: expected an index in \[0, 3\), got -1"):
            engine.run([request], 2)
    else:
        assert engine.run([request], 2)[0].children.token_ids.tolist() == expected.token_ids.tolist()
