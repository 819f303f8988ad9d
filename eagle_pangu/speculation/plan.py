"""Where the rows of one forward pass stand and what each may see, as tensors that every layer shares.

Built once a pass from the host-side tree; attention functions read it, the model never does. All indices are legal by
construction (DESIGN §3): masked entries point at a slot that holds written KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.tree import TokenTree

BLOCK = 64
"""Columns of one block of the bitwise attention (numerics: B). Blocks lie at absolute positions."""

_Value = TypeVar("_Value", np.int64, np.bool_)


def whole_blocks(columns: int) -> int:
    """So many columns, filled up to whole blocks: what KV storage for them takes."""
    return -(-columns // BLOCK) * BLOCK


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One pass over rows ``first_row ...`` of a tree that stands on `committed` final tokens of one slot.

    Row i of the tree lies at cache column ``committed + i``; its position is ``committed + depth[i]``. `group` query
    heads share a KV head; attention stacks them below each other, so masks repeat each row that often.
    """

    tree: TokenTree
    committed: int
    first_row: int
    group: int
    device: torch.device
    padding: int = 0

    @property
    def rows(self) -> int:
        """Rows computed in this pass, those included that only fill it up."""
        return self.real_rows + self.padding

    @property
    def real_rows(self) -> int:
        """Rows of the tree computed in this pass."""
        return self.tree.rows - self.first_row

    @property
    def columns(self) -> int:
        """Cache columns in use once this pass has written its rows; padding has none."""
        return self.committed + self.tree.rows

    @cached_property
    def is_chain(self) -> bool:
        """Each row's parent is the row before it: cache order is path order, as in prefill and plain decoding."""
        return bool((self.tree.depth == np.arange(self.tree.rows)).all())

    @cached_property
    def input_ids(self) -> torch.Tensor:
        """[1, rows] int64."""
        return self._tensor(self._filled_up(self.tree.token_ids))[None]

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[rows] of the sequence, 0 the first token's."""
        return self.committed + self._filled_up(self.tree.depth)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """`positions` on the device, [1, rows] int64."""
        return self._tensor(self.positions)[None]

    @cached_property
    def keep_host(self) -> NDArray[np.bool_]:
        """[rows, columns]: the committed prefix, a row's ancestors and itself."""
        keep = np.ones((self.rows, self.columns), dtype=np.bool_)
        keep[:, self.committed :] = self._filled_up(self.tree.mask)
        return keep

    @cached_property
    def keep(self) -> torch.Tensor:
        """`keep_host` on the device, [rows * group, columns] bool."""
        return self._tensor(self.keep_host.repeat(self.group, axis=0))

    @property
    def sees_all(self) -> bool:
        """The only row of the pass is the last one of a chain: no column is hidden from it."""
        return self.rows == 1 and self.is_chain

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        """`keep` as what is added to scores, 0 or -inf; made once for all layers."""
        if dtype not in self._added:
            hidden = torch.zeros(self.keep.shape, dtype=dtype, device=self.device)
            self._added[dtype] = hidden.masked_fill_(~self.keep, float("-inf"))
        return self._added[dtype]

    @cached_property
    def _added(self) -> dict[torch.dtype, torch.Tensor]:
        return {}

    # What follows serves the bitwise attention alone.

    @property
    def full_columns(self) -> int:
        """Columns in blocks that every row sees whole (numerics: n0)."""
        return self.committed // BLOCK * BLOCK

    @cached_property
    def tail_columns(self) -> int:
        """Columns after `full_columns` in path order, up to the deepest row, filled up to whole blocks (T)."""
        deepest = self.committed + int(self.tree.depth.max()) + 1
        return whole_blocks(deepest - self.full_columns)

    @cached_property
    def tail_index(self) -> torch.Tensor:
        """[rows, tail_columns] int64 cache column, counted from `full_columns`, of each position of a row's path.

        Entries past a row's own position point at the root's column, which is always written.
        """
        return self._tensor(self._tail_index)

    @cached_property
    def _tail_index(self) -> NDArray[np.int64]:
        rest = self.committed - self.full_columns
        deepest = self.tree.ancestors.shape[1]
        index = np.full((self.rows, self.tail_columns), rest, dtype=np.int64)
        index[:, :rest] = np.arange(rest)
        index[:, rest : rest + deepest] = rest + self._filled_up(self.tree.ancestors)
        return index

    @cached_property
    def tail_hidden(self) -> torch.Tensor:
        """[rows * group, tail_columns] bool: True past a row's own position."""
        tail = self.full_columns + np.arange(self.tail_columns)
        return self._tensor((tail[None, :] > self.positions[:, None]).repeat(self.group, axis=0))

    @property
    def tail_cache_columns(self) -> int:
        """Columns after `full_columns` in cache order, filled up to whole blocks."""
        return whole_blocks(self.columns) - self.full_columns

    @cached_property
    def tail_places(self) -> torch.Tensor:
        """[tail_cache_columns] int64: the place in path order of each column in cache order, both counted from
        `full_columns`; 0 for columns without a row."""
        return self._tensor(self._tail_places)

    @cached_property
    def _tail_places(self) -> NDArray[np.int64]:
        rest = self.committed - self.full_columns
        places = np.zeros(self.tail_cache_columns, dtype=np.int64)
        places[: rest + self.tree.rows] = np.concatenate([np.arange(rest), rest + self.tree.depth])
        return places

    @cached_property
    def tail_foreign(self) -> torch.Tensor:
        """[tail_columns / BLOCK, rows * group, tail_cache_columns] bool: True where a column in cache order is none of
        that block of a row's path."""
        keep = np.zeros((self.rows, self.tail_cache_columns), dtype=np.bool_)
        keep[:, : self.columns - self.full_columns] = self.keep_host[:, self.full_columns :]
        blocks = np.arange(self.tail_columns // BLOCK)
        own = keep & (self._tail_places // BLOCK == blocks[:, None])[:, None]
        return self._tensor(~own.repeat(self.group, axis=1))

    def _filled_up(self, table: NDArray[_Value]) -> NDArray[_Value]:
        """Of a table with an entry a row of the tree: those of the rows computed, the root's for padding."""
        own = table[self.first_row :]
        return np.concatenate([own, table[:1].repeat(self.padding, axis=0)]) if self.padding else own

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
