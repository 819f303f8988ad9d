"""The branchable KV cache: one slot per session, a committed prefix and at most one speculative branch (DESIGN §4).

It moves KV and counts tokens; it knows no tree rule and no attention. Unmodified model code writes into the slots of a
pass through the `transformers.Cache` of its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from eagle_pangu.speculation.indexing import copy_into, index_tensor, select
from eagle_pangu.speculation.plan import BLOCK, whole_blocks

Branch = Literal["shared", "replicate"]

SPARE_COLUMNS = BLOCK
"""Behind the capacity of a slot with static shapes; one would do, and whole blocks keep K and V aligned."""


class CacheShape(NamedTuple):
    """What the model's layers need of a slot."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class _Storage:
    """K and V of all layers: [layers, kv_heads, columns, head_dim] each, and by layer [1, kv_heads, columns, head_dim].

    Uninitialised: attention reads written columns only, or ones that `Slot.clear_values` has zeroed. Memory that is
    never touched is never backed by a page, so unused capacity costs nothing.
    """

    def __init__(self, shape: CacheShape, columns: int) -> None:
        size = (shape.layers, shape.kv_heads, columns, shape.head_dim)
        self.keys = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.values = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.by_layer = _by_layer(self.keys, self.values)

    def copy_from(self, other: _Storage, columns: int) -> None:
        """Take over the first `columns` columns, and touch no other."""
        self.keys[:, :, :columns] = other.keys[:, :, :columns]
        self.values[:, :, :columns] = other.values[:, :, :columns]


def _by_layer(keys: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One view of K and one of V for each layer, as a model hands them over: [1, kv_heads, columns, head_dim]."""
    return list(zip(keys[:, None].unbind(), values[:, None].unbind(), strict=True))


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """What transformers asks a layer of a cache for, where the caller gives positions and mask itself: nothing."""

    is_compileable = False
    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: storage exists from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Never reached: the cache itself serves every layer."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys; only read when transformers builds a mask itself, which we forbid."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Columns written; only read for positions, which are given."""
        return 0

    def get_max_length(self) -> int:
        """Capacity in columns; of no use where each session has its own."""
        return 0


class KeptColumns:
    """A copy of a slot's committed columns, and of nothing else: what is kept when its session has ended.

    Attributes:
        shape: of the slot.
        committed_length: columns.
    """

    def __init__(self, slot: Slot) -> None:
        self.shape = slot.shape
        self.committed_length = slot.committed_length
        self._main = _Storage(slot.shape, slot.committed_length)
        self._main.copy_from(slot._main, slot.committed_length)


class Slot:
    """The KV of one session.

    Args:
        shape: of the model's layers.
        capacity: columns; filled up to whole blocks.
        branch: how the branch is kept.
        static_shapes: a pass may fill its rows up to a fixed shape. Rows are then written through an index, so that no
            shape depends on their number, and what fills up goes to a column that nobody reads, behind the capacity.

    Attributes:
        capacity: columns, a multiple of `BLOCK`.
        committed_length: tokens whose KV is final.
        branch_rows: rows of the speculative branch, at columns ``committed_length ...``; 0 when there is none.
    """

    def __init__(
        self, shape: CacheShape, capacity: int, branch: Branch = "shared", *, static_shapes: bool = False
    ) -> None:
        self.shape = shape
        self.capacity = whole_blocks(capacity)
        self._columns = self.capacity + SPARE_COLUMNS * static_shapes
        self.committed_length = 0
        self.branch_rows = 0
        self._branch_kind = branch
        self._main = _Storage(shape, self._columns)
        self._branch = self._main
        self._targets = self._main.by_layer  # what `write` fills: set by `begin`, for all layers at once
        self._places: torch.Tensor | None = None  # where in it, if not from its start on

    @property
    def written(self) -> int:
        """Columns written: committed ones and the branch."""
        return self.committed_length + self.branch_rows

    def begin(self, first_row: int, rows: int, padding: int = 0) -> None:
        """Announce a pass that writes branch rows ``first_row ... rows - 1``; ``first_row == 0`` starts a new branch.

        Args:
            first_row: the rows before it are the branch already.
            rows: of the branch from now on.
            padding: rows that the pass has besides; they are written nowhere.

        Raises:
            ValueError: the rows do not continue the branch, or do not fit the capacity.
        """
        if first_row > self.branch_rows:
            raise ValueError(f"row {first_row} does not continue a branch of {self.branch_rows} rows")
        if self.committed_length + rows > self.capacity:
            raise ValueError(f"{self.committed_length} committed tokens and {rows} rows exceed {self.capacity} columns")
        if first_row == 0 and self._branch_kind == "replicate":
            self._replicate()
        self.branch_rows = rows
        new = range(self.committed_length + first_row, self.written)
        if self._columns > self.capacity:
            self._targets = self._branch.by_layer
            places = [*new, *[self.capacity] * padding]
            self._places = index_tensor(places, self._columns, self.shape.device, field="written columns")
        else:
            columns = slice(new.start, new.stop)
            self._targets = _by_layer(self._branch.keys[:, :, columns], self._branch.values[:, :, columns])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take K and V of one layer, [1, kv_heads, rows, head_dim], at the place announced by `begin`."""
        for own, given in zip(self._targets[layer], (keys, values), strict=True):
            if self._places is None:
                own.copy_(given)
            else:
                copy_into(own, 2, self._places, given.to(own.dtype))

    def columns(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, [1, kv_heads, >= capacity, head_dim]; the plan says which columns count."""
        return self._branch.by_layer[layer]

    def committed(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the committed tokens from `start` on, [layers, kv_heads, tokens, head_dim] each; views."""
        columns = slice(start, self.committed_length)
        return self._main.keys[:, :, columns], self._main.values[:, :, columns]

    def commit(self, rows: Sequence[int]) -> None:
        """Make the root and the accepted `rows` (path order, root left out) final, and drop the rest of the branch.

        Path commit with fast reorder: only accepted rows move, to the front of the branch; the prefix is never
        touched. A path that is dense already (1, 2, 3, ...) is only a length write.

        Raises:
            ValueError: a row is not a row of the branch, or there is no branch.
        """
        if self.branch_rows == 0:
            raise ValueError("nothing to commit: the slot has no branch")
        if any(not 1 <= row < self.branch_rows for row in rows):
            raise ValueError(f"expected rows in [1, {self.branch_rows}), got {list(rows)}")
        dense = list(rows) == list(range(1, len(rows) + 1))
        start = self.committed_length
        if self._branch is not self._main:
            self._gather([start], start)
        if not dense or self._branch is not self._main:
            self._gather([start + row for row in rows], start + 1)
        self.committed_length += 1 + len(rows)
        self.abort()

    def commit_all(self) -> None:
        """Make every row of the branch final (a prefill chunk is a chain)."""
        self.commit(range(1, self.branch_rows))

    def abort(self) -> None:
        """Drop the branch: a length write; its columns are unreachable from then on."""
        self.branch_rows = 0
        self._branch = self._main

    def keep(self) -> KeptColumns:
        """What is committed, in memory of its own."""
        return KeptColumns(self)

    def adopt(self, source: Slot | KeptColumns, length: int) -> None:
        """Begin with the first `length` committed tokens of another slot: their KV is copied, none other.

        Raises:
            ValueError: this slot is in use or too small, the source holds fewer tokens, or it is of another model.
        """
        if self.written:
            raise ValueError(f"expected an empty slot, got one of {self.written} columns written")
        if source.shape != self.shape:
            raise ValueError(f"expected a source of {self.shape}, got {source.shape}")
        most = min(source.committed_length, self.capacity)
        if not 0 <= length <= most:
            raise ValueError(f"expected a length in [0, {most}], got {length}")
        self._main.copy_from(source._main, length)
        self.committed_length = length

    def truncate(self, length: int) -> None:
        """Forget committed tokens past `length` (a draft whose tokens were not accepted).

        Raises:
            ValueError: the slot holds fewer tokens than that.
        """
        if not 0 <= length <= self.committed_length:
            raise ValueError(f"expected a length in [0, {self.committed_length}], got {length}")
        self.abort()
        self.committed_length = length

    def clear_values(self, start: int, end: int) -> None:
        """Zero V of unused columns, so that a whole block can be read: 0 x leftover NaN would be NaN."""
        self._branch.values[:, :, start:end] = 0

    def _gather(self, columns: Sequence[int], target: int) -> None:
        if not columns:
            return
        index = index_tensor(columns, self.capacity, self.shape.device, field="committed columns")
        end = target + len(columns)
        self._main.keys[:, :, target:end] = select(self._branch.keys, 2, index)
        self._main.values[:, :, target:end] = select(self._branch.values, 2, index)

    def _replicate(self) -> None:
        """The paper's first form: the branch works on a deep copy of the committed prefix."""
        self._branch = _Storage(self.shape, self._columns)
        self._branch.copy_from(self._main, self.committed_length)
