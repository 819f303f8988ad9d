"""The branchable KV cache: one slot per session, a committed prefix and at most one speculative branch (DESIGN §4).

It moves KV and counts tokens; it knows no tree rule and no attention. Unmodified model code writes into the slots of a
pass through the `transformers.Cache` of its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from eagle_pangu.speculation.plan import whole_blocks

Branch = Literal["shared", "replicate"]


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

    Attributes:
        capacity: columns, a multiple of `BLOCK`.
        committed_length: tokens whose KV is final.
        branch_rows: rows of the speculative branch, at columns ``committed_length ...``; 0 when there is none.
    """

    def __init__(self, shape: CacheShape, capacity: int, branch: Branch = "shared") -> None:
        self.shape = shape
        self.capacity = whole_blocks(capacity)
        self.committed_length = 0
        self.branch_rows = 0
        self._branch_kind = branch
        self._main = _Storage(shape, self.capacity)
        self._branch = self._main
        self._targets = self._main.by_layer  # what `write` fills: set by `begin`, for all layers at once

    @property
    def written(self) -> int:
        """Columns written: committed ones and the branch."""
        return self.committed_length + self.branch_rows

    def begin(self, first_row: int, rows: int) -> None:
        """Announce a pass that writes branch rows ``first_row ... rows - 1``; ``first_row == 0`` starts a new branch.

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
        new = slice(self.committed_length + first_row, self.written)
        self._targets = _by_layer(self._branch.keys[:, :, new], self._branch.values[:, :, new])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take K and V of one layer, [1, kv_heads, rows, head_dim], at the place announced by `begin`."""
        own_keys, own_values = self._targets[layer]
        own_keys.copy_(keys)
        own_values.copy_(values)

    def columns(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, [1, kv_heads, capacity, head_dim]; the plan says which columns count."""
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
            self._gather(torch.arange(start, start + 1), start)
        if not dense or self._branch is not self._main:
            self._gather(torch.tensor(list(rows), dtype=torch.int64) + start, start + 1)
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

    def _gather(self, columns: torch.Tensor, target: int) -> None:
        if columns.numel() == 0:
            return
        columns = columns.to(self.shape.device)
        end = target + columns.numel()
        self._main.keys[:, :, target:end] = self._branch.keys.index_select(2, columns)
        self._main.values[:, :, target:end] = self._branch.values.index_select(2, columns)

    def _replicate(self) -> None:
        """The paper's first form: the branch works on a deep copy of the committed prefix."""
        self._branch = _Storage(self.shape, self.capacity)
        self._branch.copy_from(self._main, self.committed_length)
