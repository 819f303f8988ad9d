"""A head on a device with static shapes drafts what it drafts elsewhere."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from draft_service.drafters import head_engine
from draft_service.drafters.base import Budget
from draft_service.drafters.eagle3 import Eagle3Drafter
from eagle_pangu.speculation.linear import LinearKernel
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.heads import FEATURES, PROMPT, RecordingEngine, assert_same, drafter_of, random_head
from tests.draft_service.passes import Alone, run_together
from tests.draft_service.test_desk import ask, desk_of, sessions_at
from tests.speculation.engines import BucketedCpu
from tests.speculation.test_buckets import WholeSlotsCpu

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (40, 1, 11, 26)


def opened(drafter: Eagle3Drafter, length: int) -> Alone:
    draft = Alone(drafter, drafter.open(PROMPT[:length], Budget(24, 7)))
    if length > 1:
        draft.read_features(0, FEATURES[: length - 1])
    return draft


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("recycles_normed", [False, True])
def test_trees_are_those_of_exact_shapes(window: int, recycles_normed: bool) -> None:
    head = random_head(recycles_normed=recycles_normed)
    exact, rounded = (
        drafter_of(RecordingEngine(head, device=device, window=window)) for device in (None, BucketedCpu())
    )
    for length in LENGTHS:
        drafts = [opened(drafter, length) for drafter in (exact, rounded)]
        first: list[TokenTree] = [draft.propose(Budget(12, 5)) for draft in drafts]
        assert_same(*first)
        for draft in drafts:
            draft.extend([*first[0].token_ids[1:2].tolist(), 7])
            draft.read_features(length - 1, FEATURES[length - 1 : length + 1])
        assert_same(*(draft.propose(Budget(9, 4)) for draft in drafts))


def test_sessions_that_share_passes_draft_the_same() -> None:
    exact, rounded = (drafter_of(RecordingEngine(random_head(), device=device)) for device in (None, BucketedCpu()))
    budget = Budget(12, 5)
    expected = [opened(exact, length).propose(budget) for length in LENGTHS]
    together = run_together(rounded, [opened(rounded, length).session.propose(budget) for length in LENGTHS])
    for ours, theirs in zip(together, expected, strict=True):
        assert_same(ours, theirs)


class RememberingCpu(WholeSlotsCpu):
    """Keeps the shapes of linear layers too."""

    def linear_kernel(self, layer: nn.Linear) -> LinearKernel:
        kernel = super().linear_kernel(layer)

        def remembered(rows: torch.Tensor) -> torch.Tensor:
            self.called.add((tuple(rows.shape), tuple(layer.weight.shape)))
            return kernel(rows)

        return remembered


def test_drafting_meets_no_shape_that_the_warm_up_has_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device, top_children = RememberingCpu(), head_engine.top_children

    def remembered(logits: torch.Tensor, width: int) -> Any:
        device.called.add(("children", width))
        return top_children(logits, width)

    monkeypatch.setattr(head_engine, "top_children", remembered)
    engine = RecordingEngine(random_head(), device=device)
    engine.warm_up(4)
    called = device.called.copy()
    drafter = drafter_of(engine, width=4)
    for length in (128, 100, 66, *LENGTHS):
        draft = opened(drafter, length)
        for budget in (Budget(12, 5), Budget(24, 7)):
            draft.propose(budget)
    assert max(engine.passes) > 64
    assert {shape for shape in device.called - called if shape[0] != "children" or shape[1] != 4} == set()
    assert engine.shapes is not None
    assert engine.shapes.warmed > 20
    assert engine.shapes.met_later == 0


async def test_sessions_that_come_together_meet_no_further_shape_and_shapes_met_later_are_counted() -> None:
    engine = RecordingEngine(random_head(), device=RememberingCpu())
    engine.warm_up(4)
    drafter, lengths = drafter_of(engine, width=4), range(33, 41)  # 64 rows each, of 128
    async with desk_of(drafter) as desk, sessions_at(desk, lengths) as sessions:
        await asyncio.gather(*map(partial(ask, desk), sessions, lengths))
    assert max(engine.sessions) > 1
    assert engine.shapes is not None
    assert engine.shapes.met_later == 0
    assert engine.shapes.warmed > 20
    run_together(drafter, [opened(drafter, length).session.propose(Budget(24, 7)) for length in lengths])
    assert engine.shapes.met_later > 0


def test_the_last_bucket_of_a_slot_is_warmed_though_not_all_of_it_fits() -> None:
    """What a star's stem takes is not there for its rows, nor are all the rows of a bucket longer than the slot."""
    device = RememberingCpu()
    RecordingEngine(random_head(max_positions=192), device=device).warm_up(4)
    rows = {shape[0][1] for shape in device.called if len(shape) == 3}
    assert rows == {1, 2, 4, 8, 16, 32, 64, 128, 256}
