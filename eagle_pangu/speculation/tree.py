"""The sentinel-free token tree (EAGLE-Pangu, "accelerator-safe tree tensors").

Row 0 is the root: the last token that the teacher decided, whose KV is not yet written. Every parent is a legal row, so
no padded table, on the wire or on a device, can hold a negative index. Host side only, NumPy: this module knows neither
torch nor messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protos.errors import InvalidFieldError

MAX_TOKEN_ID = 2**32 - 1


class Decided(Protocol):
    """A token for each row: a list, an array, or something that works it out when it is asked."""

    def __getitem__(self, row: int, /) -> int | np.int64: ...


@dataclass(frozen=True, eq=False)
class TokenTree:
    """M drafted tokens under one root: M + 1 rows in topological order.

    Args:
        token_ids: [rows] int64 vocabulary ids; ``token_ids[0]`` is the root.
        parents: [rows] int64; ``parents[0] == 0`` and ``parents[i] < i`` for i >= 1.
        scores: [rows] float32 cumulative log-probability of the drafter in nats, or None.
        valid: [rows] bool, False for rows that pad to a fixed shape; padded rows have parent 0. None: all valid.

    Construction converts; it does not check. Call `validate` on anything that a peer sent.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    scores: NDArray[np.float32] | None = None
    valid: NDArray[np.bool_] | None = field(default=None)

    @classmethod
    def root_only(cls, token_id: int) -> TokenTree:
        """Plain decoding: a tree of the root alone."""
        return cls.build([token_id], [0])

    @classmethod
    def build(cls, token_ids: ArrayLike, parents: ArrayLike, scores: ArrayLike | None = None) -> TokenTree:
        """A tree from anything array-like; see the class for the meaning of the arguments."""
        return cls(
            np.asarray(token_ids, dtype=np.int64),
            np.asarray(parents, dtype=np.int64),
            None if scores is None else np.asarray(scores, dtype=np.float32),
        )

    @property
    def rows(self) -> int:
        """Rows, the root and any padding included."""
        return len(self.token_ids)

    @property
    def drafted(self) -> int:
        """Valid rows below the root."""
        return (self.rows if self.valid is None else int(self.valid.sum())) - 1

    @cached_property
    def depth(self) -> NDArray[np.int64]:
        """[rows] distance to the root. Position id of a row = committed length + depth."""
        depth = [0] * self.rows
        for row, parent in enumerate(self.parents.tolist()):
            if row:
                depth[row] = depth[parent] + 1
        return np.array(depth, dtype=np.int64)

    @cached_property
    def ancestors(self) -> NDArray[np.int64]:
        """[rows, deepest + 1] the path of each row, root first, in column d the ancestor at depth d.

        Columns past a row's own depth hold 0, so every entry is a legal row; `depth` says which columns count.
        """
        table = np.zeros((self.rows, int(self.depth.max()) + 1), dtype=np.int64)
        for row in range(1, self.rows):
            own = self.depth[row]
            table[row, :own] = table[self.parents[row], :own]
            table[row, own] = row
        return table

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """[rows, rows] True where the column is the row itself or one of its ancestors."""
        mask = np.eye(self.rows, dtype=np.bool_)
        for row in range(1, self.rows):
            mask[row] |= mask[self.parents[row]]
        return mask

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """[rows] token id -> row of the child that carries it, valid rows only."""
        children: list[dict[int, int]] = [{} for _ in range(self.rows)]
        for row, (token_id, parent) in enumerate(zip(self.token_ids.tolist(), self.parents.tolist(), strict=True)):
            if row and (self.valid is None or self.valid[row]):
                children[parent][token_id] = row
        return children

    def accept(self, decided: Decided) -> list[int]:
        """Walk from the root along the tokens that the teacher decided (greedy or seeded alike).

        Args:
            decided: [rows] the teacher's token after each row; only rows on the path are looked at.

        Returns:
            Accepted rows in path order, the root left out. The next token is ``decided`` at the last of them (or at 0).
        """
        path: list[int] = []
        row = 0
        while (child := self.children[row].get(int(decided[row]))) is not None:
            path.append(child)
            row = child
        return path

    def padded(self, rows: int) -> TokenTree:
        """The same tree in a fixed shape: padded rows repeat the root, have parent 0 and are not valid.

        Raises:
            ValueError: the tree has more rows than that.
        """
        missing = rows - self.rows
        if missing < 0:
            raise ValueError(f"a tree of {self.rows} rows cannot be padded to {rows}")
        valid = np.ones(self.rows, dtype=np.bool_) if self.valid is None else self.valid
        return TokenTree(
            np.concatenate([self.token_ids, np.full(missing, self.token_ids[0])]),
            np.concatenate([self.parents, np.zeros(missing, dtype=np.int64)]),
            None if self.scores is None else np.concatenate([self.scores, np.zeros(missing, dtype=np.float32)]),
            np.concatenate([valid, np.zeros(missing, dtype=np.bool_)]),
        )

    def validate(self, *, vocab_size: int, max_rows: int, max_depth: int, field: str = "tree") -> None:
        """Check every rule of DESIGN §3.

        Args:
            vocab_size: every id must be smaller.
            max_rows: most drafted rows, the root not counted.
            max_depth: deepest drafted row.
            field: path under which errors name this tree.

        Raises:
            InvalidFieldError: names the field and the first row at fault.
        """
        if self.token_ids.ndim != 1 or self.rows == 0:
            raise InvalidFieldError(f"{field}.token_ids", "expected at least the root, got no row")
        for name in ("parents", "scores", "valid"):
            column = getattr(self, name)
            if column is not None and column.shape != self.token_ids.shape:
                raise InvalidFieldError(f"{field}.{name}", f"expected {self.rows} rows, got {column.size}")
        if self.drafted > max_rows:
            raise InvalidFieldError(
                f"{field}.token_ids", f"expected at most {max_rows} drafted rows, got {self.drafted}"
            )
        # Lists: a tree is small, every round validates two, and for so few rows each call of NumPy costs more than all
        # of a loop does.
        token_ids, parents = self.token_ids.tolist(), self.parents.tolist()
        for row, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise InvalidFieldError(
                    f"{field}.token_ids", f"expected an id in [0, {vocab_size}), got {token_id}", row
                )
        if parents[0] != 0:
            raise InvalidFieldError(f"{field}.parents", f"expected the root's parent to be 0, got {parents[0]}", 0)
        for row, parent in enumerate(parents):
            if row and not 0 <= parent < row:
                raise InvalidFieldError(
                    f"{field}.parents", f"expected an earlier row (0 <= parent < row), got {parent}", row
                )
        valid = None if self.valid is None else self.valid.tolist()
        for row, depth in enumerate(self.depth.tolist()):
            if depth > max_depth and (valid is None or valid[row]):
                raise InvalidFieldError(f"{field}.parents", f"expected depth at most {max_depth}, got {depth}", row)
        seen: set[tuple[int, int]] = set()
        for row, sibling in enumerate(zip(parents, token_ids, strict=True)):
            if not row or (valid is not None and not valid[row]):
                continue
            if sibling in seen:
                parent, token_id = sibling
                raise InvalidFieldError(
                    f"{field}.token_ids", f"expected distinct siblings, got id {token_id} twice under row {parent}", row
                )
            seen.add(sibling)
        self._validate_scores(field)
        self._validate_validity(field)

    def _validate_scores(self, field: str) -> None:
        if self.scores is None:
            return
        for row, score in enumerate(self.scores.tolist()):
            if not math.isfinite(score):
                raise InvalidFieldError(f"{field}.scores", f"expected a finite number, got {score}", row)
        if self.scores[0] != 0:
            raise InvalidFieldError(f"{field}.scores", f"expected 0 at the root, got {self.scores[0]}", 0)

    def _validate_validity(self, field: str) -> None:
        if self.valid is None:
            return
        if not self.valid[0]:
            raise InvalidFieldError(f"{field}.valid", "expected the root to be valid", 0)
        _refuse_first(
            self.valid & ~self.valid[self.parents],
            f"{field}.valid",
            self.parents,
            "expected a valid parent under a valid row",
        )
        _refuse_first(
            ~self.valid & (self.parents != 0), f"{field}.valid", self.parents, "expected a padded row to point at row 0"
        )


def _refuse_first(wrong: NDArray[np.bool_], field: str, values: NDArray[np.generic], expected: str) -> None:
    rows = np.flatnonzero(wrong)
    if rows.size:
        row = int(rows[0])
        raise InvalidFieldError(field, f"{expected}, got {values[row]}", row)
