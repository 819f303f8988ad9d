"""The standalone drafter: a smaller causal language model with the teacher's tokenizer and KV of its own.

The tree grows level by level (`growth`); each level takes part in one forward pass, over the nodes worth expanding.
What it writes stays in the slot as a branch, and the part of it that the teacher decides is committed, not computed
again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Budget, DrafterError, ModelIdentity
from draft_service.drafters.children import NO_CHILDREN, Children, top_children
from draft_service.drafters.compute import configured_compute
from draft_service.drafters.growth import Branch, TreeGrowth
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.checkpoints import CheckpointError, load_checkpoint
from eagle_pangu.speculation.devices.base import AttentionError
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.models import ModelError, resolve_model
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree
from eagle_pangu.speculation.warm_up import warm_up

CATCH_UP_ROWS = 8
"""Most decided tokens, the root included, that a round reads as the first rows of its branch; more are prefilled."""


class StandaloneSession:
    """One sequence of the standalone drafter; see `DraftSession`.

    Two places matter: `committed_length` of the slot, before which KV is final, and the branch, the tree of rows
    written after it. The branch begins with decided tokens in a chain (the last one is the root), then holds expanded
    nodes.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], width: int, context_limit: int) -> None:
        self._engine = engine
        self._slot = engine.open_slot()
        self._tokens = list(prompt)
        self._width = width
        self._context_limit = context_limit
        self._branch: Branch | None = None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append decided tokens; they are read when the next work is done."""
        self._tokens.extend(token_ids)

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        """Never called: needs_features is False."""

    def advance(self) -> Generator[Segment, Children, None]:
        """Keep what the branch got right, then prefill chunk by chunk; the last few tokens are left to `propose`."""
        self._commit_branch()
        end = len(self._tokens) - 1
        while end < self._context_limit and end - self._slot.committed_length >= CATCH_UP_ROWS:
            start = self._slot.committed_length
            chunk = self._tokens[start : min(end, start + self._engine.chunk)]
            yield known_tokens(self._slot, np.array(chunk, dtype=np.int64), want_logits=False)

    def propose(self, budget: Budget) -> Generator[Segment, Children, TokenTree]:
        """Grow a tree by cumulative log-probability, one forward pass a level."""
        growth = TreeGrowth(self._tokens[-1], budget.rows, self._width)
        depth = min(budget.depth, self._context_limit - len(self._tokens))
        if budget.rows == 0 or depth <= 0:
            return growth.tree()
        yield from self.advance()
        branch = Branch(self._tokens[self._slot.committed_length :])
        children = yield Segment(self._slot, branch.tree, logits_from=branch.decided - 1)
        for level in range(1, depth + 1):
            growth.expand(growth.frontier[children.rows], children.token_ids, children.log_probs)
            room = self._slot.capacity - self._slot.committed_length - branch.tree.rows
            if level == depth or not 0 < len(growth.frontier) <= room:
                break
            first = branch.add_frontier(growth)
            children = yield Segment(self._slot, branch.tree, first, logits_from=first)
        self._branch = branch
        return growth.tree()

    def close(self) -> None:
        """The KV goes with the session."""

    def _commit_branch(self) -> None:
        """Commit the rows that the sequence went on with; never the new root, whose logits are still needed."""
        branch, self._branch = self._branch, None
        if branch is None or len(self._tokens) - 1 == self._slot.committed_length:
            return
        path, row = [], 0
        for token_id in self._tokens[self._slot.committed_length + 1 : -1]:
            if token_id not in branch.tree.children[row]:
                break
            row = branch.tree.children[row][token_id]
            path.append(row)
        self._engine.commit(self._slot, path)


class StandaloneDrafter:
    """A causal language model that drafts; see `Drafter`.

    Args:
        engine: of the draft model; the drafter's thread is its only user.
        width: children tried under each node, and most nodes expanded in one level.
    """

    name = "standalone"
    needs_features = False

    def __init__(self, engine: Engine, width: int) -> None:
        self._engine = engine
        self._width = width
        self.shapes = engine.shapes
        checkpoint = engine.checkpoint
        self.context_limit = min(checkpoint.context_limit, engine.slot_capacity)
        self.identity = ModelIdentity(
            checkpoint.name, checkpoint.tokenizer.sha256, checkpoint.vocab_size, checkpoint.eos_token_ids
        )

    def open(self, prompt: Sequence[int], max_budget: Budget) -> StandaloneSession:
        """A session with a slot of its own; the prompt is not read yet."""
        return StandaloneSession(self._engine, prompt, self._width, self.context_limit)

    def together(self, requests: Sequence[Segment]) -> int:
        """All, or as many as the shapes run at start allow."""
        buckets = self._engine.buckets
        return buckets.together([request.rows for request in requests]) if buckets else len(requests)

    def compute(self, requests: Sequence[Segment]) -> list[Children]:
        """One forward pass; none of a chunk that is only read."""
        logits = [result.logits for result in self._engine.run(requests)]
        wanted = [each for each in logits if each is not None]
        if not wanted:
            return [NO_CHILDREN] * len(requests)
        joint = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        return top_children(joint, self._width).split([0 if each is None else len(each) for each in logits])


def load_standalone(settings: DraftSettings) -> StandaloneDrafter:
    """Load the configured model, ready to draft.

    Raises:
        DrafterError: the model or the device cannot be used.
    """
    device, dtype = configured_compute(settings)
    try:
        checkpoint = load_checkpoint(resolve_model(settings.model), dtype, device)
    except (CheckpointError, ModelError) as error:
        raise DrafterError(f"draft.model: {error}") from error
    try:
        engine = Engine(
            checkpoint,
            device,
            mode="performance",
            numerics="free",  # a draft's rounding costs speed at most
            slot_capacity=settings.slot_capacity,
            max_rows=CATCH_UP_ROWS + settings.branching * settings.max_depth,
            attention=settings.attention,
            check_indices=settings.check_indices,
        )
    except AttentionError as error:
        raise DrafterError(f"draft.attention: {error}") from error
    warm_up(engine)
    return StandaloneDrafter(engine, settings.branching)
