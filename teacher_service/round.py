"""One round as a peer asks for it, and the rules that its tree is held to.

Plain values: the message they came from, the model and the session's state are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_pangu.speculation.tree import TokenTree
from protos.errors import InvalidFieldError
from teacher_service.opening import Limits, Opening


@dataclass(frozen=True, eq=False)
class Round:
    """A `verify` message: see VerifyTree for the rules that `Session.check` holds it to."""

    epoch: int
    number: int
    committed_length: int
    commit: int
    tree: TokenTree

    def repeats(self, other: Round) -> bool:
        """Same question: equal but for the drafter's scores, which decide nothing."""
        return (
            self.commit == other.commit
            and np.array_equal(self.tree.token_ids, other.tree.token_ids)
            and np.array_equal(self.tree.parents, other.tree.parents)
        )


def check_tree(tree: TokenTree, opening: Opening, limits: Limits, committed_length: int, root: int) -> None:
    """Hold a tree to its own rules, to what its session was opened for, and to the token that it must begin with.

    Raises:
        InvalidFieldError: names the field, and the row when it is one row.
    """
    tree.validate(vocab_size=limits.vocab_size, max_rows=opening.max_rows, max_depth=opening.max_depth)
    if tree.token_ids[0] != root:
        raise InvalidFieldError(
            "tree.token_ids", f"expected the token after the committed ones, {root}, got {tree.token_ids[0]}", 0
        )
    positions = committed_length + tree.depth
    for row in np.flatnonzero(positions >= limits.context_limit)[:1].tolist():
        raise InvalidFieldError(
            "tree.parents", f"expected a position below {limits.context_limit}, got {positions[row]}", row
        )
    room = opening.capacity - committed_length
    if tree.rows > room:
        raise InvalidFieldError(
            "tree.token_ids",
            f"expected at most {room} rows, with {committed_length} tokens committed in a session opened for "
            f"{len(opening.prompt)} prompt tokens, {opening.max_new_tokens} new ones (open.max_new_tokens) and "
            f"{opening.max_rows} tree rows, got {tree.rows}",
            room,
        )
