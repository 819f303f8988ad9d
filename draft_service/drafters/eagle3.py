"""The EAGLE-3 drafter (arXiv 2503.01840): a head of one layer that reads the teacher's features.

Row t of the head pairs the features of token t with the embedding of token t + 1 and stands at position t, so it can
be run once both are known, and its KV is final then. The last such row, that of the root's predecessor, gives the
root's children; below it the tree grows level by level, each row with its parent's output in the place of features. A
level takes part in one pass. KV of those rows is approximate and dropped with its branch: what the teacher accepts of
them is run again, with features.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Budget, ModelIdentity
from draft_service.drafters.growth import Branch, TreeGrowth, best_subtree
from draft_service.drafters.head_engine import HeadEngine, HeadRequest, HeadResult
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.speculation.indexing import index_tensor, select
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree

CATCH_UP_ROWS = 8
"""Most rows with features, the last one not counted, that a round runs as the first of its branch; more are read."""

LEAST_GAIN = 0.1
"""Tokens that a further level must be able to bring to a round, else it is not run: about what its pass costs. On
answers of the default head this spares a quarter of the passes for 0.3 % of the tokens."""

CHUNK = 256
"""Most rows read in one pass."""

log = get_logger(__name__)


class Eagle3Session:
    """One sequence of the EAGLE-3 drafter; see `DraftSession`.

    The slot's committed length is the number of rows whose KV is final; features are kept from that row on.
    """

    def __init__(self, engine: HeadEngine, prompt: Sequence[int], width: int) -> None:
        self._engine = engine
        self._slot = engine.open_slot()
        self._tokens = list(prompt)
        self._width = width
        self._features = np.empty((0, engine.feature_width), dtype=np.uint16)
        self._features_end = 0
        self._branch: Branch | None = None
        self._has_warned = False

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append decided tokens; their rows are run when the next work is done."""
        self._tokens.extend(token_ids)

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        """Store them; those of tokens past the context limit are of no use."""
        assert start == self._features_end, "features come without gaps"
        room = max(0, self._engine.context_limit - start)
        self._features = np.concatenate([self._features, features[:room]])
        self._features_end += len(features)

    def advance(self) -> Generator[HeadRequest, HeadResult, None]:
        """Read rows, a chunk a pass; the last few are left to `propose`, which has a pass to run anyway."""
        self._settle()
        end = min(len(self._tokens) - 2, self._features_end)
        while end - self._slot.committed_length >= CATCH_UP_ROWS and len(self._tokens) <= self._engine.context_limit:
            start = self._slot.committed_length
            rows = min(end - start, CHUNK)
            token_ids = np.array(self._tokens[start + 1 : start + 1 + rows], dtype=np.int64)
            yield HeadRequest(known_tokens(self._slot, token_ids, want_logits=False), self._features[:rows])
            self._features = self._features[rows:]

    def propose(self, budget: Budget) -> Generator[HeadRequest, HeadResult, TokenTree]:
        """Grow a tree by cumulative log-probability, one pass a level."""
        candidates = yield from self.candidates(budget)
        return best_subtree(candidates, budget.rows)

    def candidates(self, budget: Budget, share: float = 1.0) -> Generator[HeadRequest, HeadResult, TokenTree]:
        """All that competes for the rows of a proposal, scored; the root alone for want of features, context or budget.

        Not pruned to the budget: another predictor of the same sequence may add to it.

        Args:
            budget: of the tree.
            share: weight of the head among all predictors: where it is small, its further levels change little.
        """
        growth = TreeGrowth(self._tokens[-1], budget.rows, self._width)
        depth = min(budget.depth, self._engine.context_limit - len(self._tokens))
        if budget.rows == 0 or depth <= 0 or not self._knows_the_root():
            return growth.candidates
        yield from self.advance()
        # The rows not read yet, up to that of the root's predecessor.
        branch = Branch(self._tokens[self._slot.committed_length + 1 :])
        rows = Segment(self._slot, branch.tree, logits_from=branch.decided - 1)
        outputs, children = yield HeadRequest(rows, self._features[: branch.decided])
        for level in range(1, depth + 1):
            growth.expand(growth.frontier[children.rows], children.token_ids, children.log_probs)
            room = self._slot.capacity - self._slot.committed_length - branch.tree.rows
            if level == depth or not 0 < len(growth.frontier) <= room or share * growth.reach < LEAST_GAIN:
                break
            first = branch.add_frontier(growth)
            rows = Segment(self._slot, branch.tree, first, logits_from=first)
            parents = index_tensor(branch.tree.parents[first:], len(outputs), outputs.device, field="parents")
            below, children = yield HeadRequest(rows, select(outputs, 0, parents))
            outputs = torch.cat([outputs, below])
        self._branch = branch
        return growth.candidates

    def close(self) -> None:
        """The KV goes with the session."""

    def _knows_the_root(self) -> bool:
        """The features of the token before the root are there: nothing else can stand for them."""
        missing = len(self._tokens) - 1 - self._features_end
        if missing > 0 and not self._has_warned:
            log.warning("features missing", tokens=len(self._tokens), features_end=self._features_end)
            self._has_warned = True
        return missing <= 0 and len(self._tokens) > 1

    def _settle(self) -> None:
        """Drop the branch but for its rows with features, which are final.

        Asked again about the same root, the output of its predecessor's row is needed again: then they all go.
        """
        branch, self._branch = self._branch, None
        if branch is None:
            return
        if len(self._tokens) - 1 == self._slot.committed_length + branch.decided:
            self._slot.abort()
            return
        self._slot.commit(range(1, branch.decided))
        self._features = self._features[branch.decided :]


class Eagle3Drafter:
    """A head that drafts; see `Drafter`.

    Args:
        engine: of the head; the drafter's thread is its only user.
        identity: of the head's teacher.
        width: children tried under each node, and most nodes expanded in one level.
    """

    name = "eagle3"
    needs_features = True

    def __init__(self, engine: HeadEngine, identity: ModelIdentity, width: int) -> None:
        self._engine = engine
        self._width = width
        self.identity = identity
        self.context_limit = engine.context_limit
        self.shapes = engine.shapes

    def open(self, prompt: Sequence[int], max_budget: Budget) -> Eagle3Session:
        """A session with a slot of its own; nothing is read before features come."""
        return Eagle3Session(self._engine, prompt, self._width)

    def together(self, requests: Sequence[HeadRequest]) -> int:
        """All, or as many as the shapes run at start allow."""
        return self._engine.together(requests)

    def compute(self, requests: Sequence[HeadRequest]) -> list[HeadResult]:
        """One pass of the head."""
        return self._engine.run(requests, self._width)
