"""The standalone drafter: a smaller causal language model with the teacher's tokenizer and KV of its own.

The tree grows level by level (`growth`); each level is one forward pass over the nodes worth expanding. What the pass
writes stays in the slot as a branch, and the part of it that the teacher decides is committed, not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Budget, DrafterError, ModelIdentity
from draft_service.drafters.children import top_children
from draft_service.drafters.compute import configured_compute
from draft_service.drafters.growth import Branch, TreeGrowth
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.checkpoints import CheckpointError, load_checkpoint
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.models import ModelError, resolve_model
from eagle_pangu.speculation.tree import TokenTree

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

    def advance(self) -> bool:
        """Keep what the branch got right, then prefill one chunk; the last few tokens are left to `propose`."""
        self._commit_branch()
        start, end = self._slot.committed_length, len(self._tokens) - 1
        if end - start < CATCH_UP_ROWS or end >= self._context_limit:
            return False
        chunk = self._tokens[start : min(end, start + self._engine.chunk)]
        self._engine.prefill(self._slot, np.array(chunk, dtype=np.int64), want_logits=False)
        return end - self._slot.committed_length >= CATCH_UP_ROWS

    def propose(self, budget: Budget) -> TokenTree:
        """Grow a tree by cumulative log-probability, one forward pass a level."""
        growth = TreeGrowth(self._tokens[-1], budget.rows, self._width)
        depth = min(budget.depth, self._context_limit - len(self._tokens))
        if budget.rows == 0 or depth <= 0:
            return growth.tree()
        while self.advance():
            pass
        logits = self._read_root()
        assert self._branch is not None
        for level in range(1, depth + 1):
            children = top_children(logits, self._width)
            growth.expand(growth.frontier[children.rows], children.token_ids, children.log_probs)
            room = self._slot.capacity - self._slot.committed_length - self._branch.tree.rows
            if level == depth or not 0 < len(growth.frontier) <= room:
                break
            logits = self._read_frontier(growth)
        return growth.tree()

    def close(self) -> None:
        """The KV goes with the session."""

    def _commit_branch(self) -> None:
        """Commit the rows that the sequence went on with; never the new root, whose logits are still needed."""
        decided = self._tokens[self._slot.committed_length + 1 : -1]
        if self._branch is None or len(self._tokens) - 1 == self._slot.committed_length:
            return
        path, row = [], 0
        for token_id in decided:
            if token_id not in self._branch.tree.children[row]:
                break
            row = self._branch.tree.children[row][token_id]
            path.append(row)
        self._engine.commit(self._slot, path)
        self._branch = None

    def _read_root(self) -> torch.Tensor:
        """Begin a branch with the tokens not read yet; [1, vocab_size] logits of the last one, the root."""
        self._branch = Branch(self._tokens[self._slot.committed_length :])
        logits = self._engine.verify(self._slot, self._branch.tree, want_features=False).logits
        assert logits is not None
        return logits[-1:]

    def _read_frontier(self, growth: TreeGrowth) -> torch.Tensor:
        """Add the frontier to the branch; [frontier, vocab_size] logits."""
        assert self._branch is not None
        first = self._branch.add_frontier(growth)
        logits = self._engine.grow(self._slot, self._branch.tree, first).logits
        assert logits is not None
        return logits


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
        checkpoint = engine.checkpoint
        self.context_limit = min(checkpoint.context_limit, engine.slot_capacity)
        self.identity = ModelIdentity(
            checkpoint.name, checkpoint.tokenizer.sha256, checkpoint.vocab_size, checkpoint.eos_token_ids
        )

    def open(self, prompt: Sequence[int], max_budget: Budget) -> StandaloneSession:
        """A session with a slot of its own; the prompt is not read yet."""
        return StandaloneSession(self._engine, prompt, self._width, self.context_limit)


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
    engine = Engine(
        checkpoint,
        device,
        mode="performance",
        numerics="free",  # a draft's rounding costs speed at most
        slot_capacity=settings.slot_capacity,
        max_rows=CATCH_UP_ROWS + settings.branching * settings.max_depth,
    )
    engine.warm_up()
    return StandaloneDrafter(engine, settings.branching)
