"""A head on a device with static shapes drafts what it drafts elsewhere."""

from __future__ import annotations

import pytest

from draft_service.drafters.base import Budget
from draft_service.drafters.eagle3 import Eagle3Drafter
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.heads import FEATURES, PROMPT, RecordingEngine, assert_same, drafter_of, random_head
from tests.draft_service.passes import Alone, run_together
from tests.speculation.engines import BucketedCpu

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
