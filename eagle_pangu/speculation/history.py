"""What stands before each row of a tree: the committed tokens, which all rows share, and the row's own path.

Host side only, NumPy. It knows which tokens are answer; what they do to logits is not its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.tree import TokenTree


class Occurrences(NamedTuple):
    """Which tokens the rows have had, over the ids that any of them has.

    token_ids: [ids] int64, distinct; seen: [rows, ids] bool, in prompt or answer; answer_counts: [rows, ids] int64.
    """

    token_ids: NDArray[np.int64]
    seen: NDArray[np.bool_]
    answer_counts: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Histories:
    """The history of each row, the row's own token included: what plain decoding would have behind it.

    Args:
        committed: [committed] int64 ids, prompt and answer.
        answer_start: how many of them are prompt.
        paths: [rows, deepest] int64 ids after the committed ones; past a row's length any id of its path.
        lengths: [rows] int64, how many columns of `paths` count.
    """

    committed: NDArray[np.int64]
    answer_start: int
    paths: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of_tree(cls, committed: NDArray[np.int64], answer_start: int, tree: TokenTree) -> Histories:
        """One history a row of the tree: the committed tokens and the path from the root to the row."""
        return cls(committed, answer_start, tree.token_ids[tree.ancestors], tree.depth + 1)

    @classmethod
    def of_committed(cls, committed: NDArray[np.int64], answer_start: int) -> Histories:
        """One row with nothing but the committed tokens: prefill's last."""
        return cls(committed, answer_start, np.zeros((1, 0), np.int64), np.zeros(1, np.int64))

    @property
    def positions(self) -> NDArray[np.int64]:
        """[rows] position of the token that is decided after each row."""
        return len(self.committed) + self.lengths

    @property
    def answer_lengths(self) -> NDArray[np.int64]:
        """[rows] answer tokens so far."""
        return self.positions - self.answer_start

    def occurrences(self) -> Occurrences:
        """Count what each row has had."""
        shape = self.paths.shape
        token_ids, place = np.unique(np.concatenate([self.committed, self.paths.ravel()]), return_inverse=True)
        committed, on_path = place[: len(self.committed)], place[len(self.committed) :].reshape(shape)
        prompt_counts = np.bincount(committed[: self.answer_start], minlength=len(token_ids))
        answer_counts = np.bincount(committed[self.answer_start :], minlength=len(token_ids))
        counts = np.tile(answer_counts, (shape[0], 1))
        row, column = np.nonzero(np.arange(shape[1]) < self.lengths[:, None])
        np.add.at(counts, (row, on_path[row, column]), 1)
        return Occurrences(token_ids, (prompt_counts > 0) | (counts > 0), counts)

    def endings(self, length: int) -> list[tuple[int, ...]]:
        """[rows] the last `length` tokens of each row; fewer where it has fewer."""
        recent = self.committed[max(len(self.committed) - length, 0) :].tolist()
        endings = []
        for path, own in zip(self.paths.tolist(), self.lengths.tolist(), strict=True):
            tokens = recent + path[:own]
            endings.append(tuple(tokens[max(len(tokens) - length, 0) :]))
        return endings
