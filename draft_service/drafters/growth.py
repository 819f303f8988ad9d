"""Choosing the rows of a tree: cumulative scores, best first (EAGLE-2, arXiv 2406.16858, "expand" and "rerank").

Pure NumPy: where children and their log-probabilities come from is not known here. Nodes are numbered as they are
added, so a parent has a smaller number than its children; scores are float32 sums of log-probabilities <= 0, so it
never has a smaller score either. Ordering by score and then by number therefore puts a parent before its children, and
any first part of that order is closed under parents, ties included (DESIGN §3). `Branch` keeps the books of a drafter
that expands nodes in a KV cache: which of its rows is which node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.tree import TokenTree


def best_nodes(scores: NDArray[np.float32], rows: int) -> NDArray[np.int64]:
    """The root and the `rows` nodes of highest score, ties by number; ascending.

    Args:
        scores: [nodes] cumulative, node 0 the root; none higher than its parent's.
        rows: most nodes to choose beside the root.
    """
    chosen = np.argsort(-scores[1:], kind="stable")[:rows] + 1
    return np.concatenate([np.zeros(1, dtype=np.int64), np.sort(chosen)])


def best_subtree(candidates: TokenTree, rows: int) -> TokenTree:
    """The tree of `best_nodes`, rows in the order of the candidates."""
    assert candidates.scores is not None
    chosen = best_nodes(candidates.scores, rows)
    parents = np.searchsorted(chosen, candidates.parents[chosen])
    assert (chosen[parents] == candidates.parents[chosen]).all(), "a chosen node's parent was not chosen"
    return TokenTree(candidates.token_ids[chosen], parents.astype(np.int64), candidates.scores[chosen])


class TreeGrowth:
    """A tree that grows level by level; every candidate ever added competes for a row at the end.

    Args:
        root: token at row 0.
        rows: drafted rows of the final tree.
        width: most nodes of a level that are expanded.
    """

    def __init__(self, root: int, rows: int, width: int) -> None:
        self.candidates = TokenTree.build([root], [0], [0.0])
        self.frontier = np.zeros(1, dtype=np.int64)
        """Nodes to expand next, ascending; empty when no further level can change the tree."""
        self._rows = rows
        self._width = width

    def expand(self, parents: NDArray[np.int64], token_ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Add one level of candidates and choose those to expand next.

        A node outside the best `rows` so far is not expanded: as many nodes as the tree has rows stand before it, and
        so before all of its descendants.

        Args:
            parents: [candidates] nodes of the frontier, ascending.
            token_ids: [candidates] distinct under one parent.
            log_probs: [candidates] of each token given its path, float32, finite, <= 0.
        """
        old = self.candidates
        assert old.scores is not None
        scores = old.scores[parents] + log_probs
        self.candidates = TokenTree(
            np.concatenate([old.token_ids, token_ids]),
            np.concatenate([old.parents, parents]),
            np.concatenate([old.scores, scores]),
        )
        widest = old.rows + np.argsort(-scores, kind="stable")[: self._width]
        assert self.candidates.scores is not None
        self.frontier = np.intersect1d(widest, best_nodes(self.candidates.scores, self._rows))

    @property
    def reach(self) -> float:
        """Probability that the sequence goes on through a node of the frontier, as its scores have it: the most tokens
        that a further level can bring."""
        assert self.candidates.scores is not None
        return float(np.exp(self.candidates.scores[self.frontier]).sum())

    def tree(self) -> TokenTree:
        """The best `rows` candidates of all levels, under the root."""
        return best_subtree(self.candidates, self._rows)


class Branch:
    """The rows that a growing tree has in a slot: decided tokens in a chain, the last one the root, then the nodes.

    Args:
        decided: >= 1 tokens of the chain, not final in the slot yet.

    Attributes:
        decided: rows of the chain.
        tree: the rows as they lie in the slot, without scores.
    """

    def __init__(self, decided: Sequence[int]) -> None:
        self.decided = len(decided)
        self.tree = TokenTree.build(decided, np.maximum(np.arange(len(decided)) - 1, 0))
        self._row_of_node = {0: len(decided) - 1}

    def add_frontier(self, growth: TreeGrowth) -> int:
        """Append the nodes that are expanded next, whose parents are here already; returns the first new row."""
        first, nodes = self.tree.rows, growth.frontier
        parents = [self._row_of_node[parent] for parent in growth.candidates.parents[nodes].tolist()]
        self._row_of_node.update((node, first + place) for place, node in enumerate(nodes.tolist()))
        self.tree = TokenTree(
            np.concatenate([self.tree.token_ids, growth.candidates.token_ids[nodes]]),
            np.concatenate([self.tree.parents, np.array(parents, dtype=np.int64)]),
        )
        return first
