"""Every drafter with a model: what sessions draft in shared passes is what each drafts alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.base import Budget, Drafter, run_alone
from draft_service.drafters.hybrid import HybridDrafter
from draft_service.drafters.standalone import StandaloneDrafter
from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.heads import (
    FEATURES,
    PROMPT,
    RecordingEngine,
    assert_same,
    deepest_path,
    drafter_of,
    random_head,
)
from tests.draft_service.passes import run_together
from tests.models import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
# So many tokens each: the root alone, a few, more than a chunk of either model.
LENGTHS = (40, 1, 11, 26, 40, 3)
BUDGETS = (Budget(12, 5), Budget(4, 2), Budget(0, 5), Budget(24, 3), Budget(1, 1), Budget(9, 7))
AnyDrafter = Drafter[Any, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tmp_path_factory.mktemp("draft")
    tiny_llama(directory, max_position_embeddings=160, num_hidden_layers=2, initializer_range=0.6)
    device = get_device("cpu")
    checkpoint = load_checkpoint(directory, torch.float32, device)
    return Engine(checkpoint, device, numerics="free", slot_capacity=160, max_rows=64, chunk=16)


@pytest.fixture(params=["eagle3", "recycles normed", "hybrid", "standalone"])
def drafter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AnyDrafter:
    monkeypatch.setattr("draft_service.drafters.eagle3.CHUNK", 16)
    if request.param == "standalone":
        return StandaloneDrafter(request.getfixturevalue("engine"), 4)
    head = drafter_of(RecordingEngine(random_head(recycles_normed=request.param == "recycles normed")))
    return HybridDrafter(head, 1, 4, 8) if request.param == "hybrid" else head


class Story:
    """A session, and what its teacher has decided so far."""

    def __init__(self, drafter: AnyDrafter, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.draft = drafter.open(self.tokens, Budget(24, 7))
        self.described = 0
        self._describe(drafter)

    def go_on(self, drafter: AnyDrafter, tree: TokenTree, accepted: int) -> None:
        appended = [*deepest_path(tree)[:accepted], 7]
        self.draft.extend(appended)
        self.tokens += appended
        self._describe(drafter)

    def _describe(self, drafter: AnyDrafter) -> None:
        end = len(self.tokens) - 1
        if drafter.needs_features and end > self.described:
            self.draft.read_features(self.described, FEATURES[self.described : end])
            self.described = end


def alone(drafter: AnyDrafter, tokens: Sequence[int], budget: Budget) -> TokenTree:
    return run_alone(drafter, Story(drafter, tokens).draft.propose(budget))


def test_round_after_round_each_session_has_its_own_tree(drafter: AnyDrafter) -> None:
    stories = [Story(drafter, PROMPT[:length]) for length in LENGTHS]
    for turn, late in enumerate([(0,) * 6, (0, 1, 2, 3, 4, 5), (3, 0, 1, 4, 0, 2)]):
        budgets = np.roll(np.arange(6), turn)
        works = [story.draft.propose(BUDGETS[each]) for story, each in zip(stories, budgets, strict=True)]
        trees = run_together(drafter, works, late)
        for story, tree, each in zip(stories, trees, budgets, strict=True):
            assert_same(tree, alone(drafter, story.tokens, BUDGETS[each]), 1e-5)
        for place, (story, tree) in enumerate(zip(stories, trees, strict=True)):
            story.go_on(drafter, tree, accepted=(place + turn) % 4)


def test_prompts_are_read_beside_the_levels_of_others(drafter: AnyDrafter) -> None:
    reader, other, third = (Story(drafter, PROMPT[:length]) for length in (40, 26, 5))
    works = [reader.draft.advance(), other.draft.propose(BUDGETS[0]), third.draft.propose(BUDGETS[0])]
    _, *trees = run_together(drafter, works, (1, 0, 0))
    for tree, story in zip(trees, (other, third), strict=True):
        assert_same(tree, alone(drafter, story.tokens, BUDGETS[0]), 1e-5)
    assert not list(_steps(drafter, reader.draft.advance())), "a part of the prompt was left"
    assert_same(run_alone(drafter, reader.draft.propose(BUDGETS[0])), alone(drafter, PROMPT, BUDGETS[0]), 1e-5)


@pytest.mark.parametrize("about", ["the same root", "a later one"])
@pytest.mark.parametrize("passes", range(1, 6))
def test_a_session_whose_proposal_was_abandoned_or_failed_at_any_pass_can_be_asked_again(
    drafter: AnyDrafter, passes: int, about: str
) -> None:
    story = Story(drafter, PROMPT)
    story.go_on(drafter, run_alone(drafter, story.draft.propose(BUDGETS[0])), accepted=3)
    work = story.draft.propose(BUDGETS[0])
    for _, _ in zip(range(passes), _steps(drafter, work), strict=False):
        pass
    if passes % 2:
        with pytest.raises(RuntimeError, match="the pass"):
            work.throw(RuntimeError("the pass failed"))
    else:
        work.close()
    if about == "a later one":
        story.go_on(drafter, TokenTree.root_only(7), accepted=0)
    for _ in range(2):
        tree = run_alone(drafter, story.draft.propose(BUDGETS[0]))
        assert_same(tree, alone(drafter, story.tokens, BUDGETS[0]), 1e-5)
        story.go_on(drafter, tree, accepted=1)


def _steps(drafter: AnyDrafter, work: Any) -> Any:
    """What the work asks for, one after the other; computed when the next is asked for."""
    try:
        request = next(work)
        while True:
            yield request
            request = work.send(drafter.compute([request])[0])
    except StopIteration:
        return
