"""The KV of a batch as a rectangle, padded on the left so that all sessions' tokens end at one column (EQSPEC).

After "Batch Speculative Decoding Done Right": sessions accept different numbers of tokens, so before every pass their
rows are unpadded, what they accepted is appended, and they are padded again. Each session's slot keeps its own KV as
well, so that a session may join or leave at any round; the rectangle is a copy, kept from pass to pass as far as it
holds. It knows slots, no tree and no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from transformers.cache_utils import Cache

from eagle_pangu.speculation.cache import CacheShape, Slot, SlotLayer
from eagle_pangu.speculation.plan import whole_blocks

SPARE_SHARE = 1 / 4
"""Columns more than asked for: texts grow with every pass, and all is moved when the room does."""


class SynchronisationError(Exception):
    """A session's row of the batch has fallen out of step: its logits would not be the teacher's own.

    Attributes:
        row: of the batch, counted in the order of its sessions.
    """

    def __init__(self, row: int, text: str) -> None:
        self.row = row
        super().__init__(f"session row {row}: {text}")


@dataclass(frozen=True)
class _Member:
    """Who has a row of the rectangle: its slot (not kept alive), and where the committed tokens lie."""

    slot: ref[Slot]
    pad: int
    length: int


class Rectangle(Cache):  # type: ignore[misc]  # transformers is untyped
    """K and V, [layers, batch, kv_heads, columns, head_dim] each, of the sessions of a pass.

    A member's tokens lie at columns ``pad ... pad + length - 1``; what is left of them holds zeros, so that no leftover
    NaN of another session reaches a row through a hidden column (0 x NaN is NaN). Columns from `end` on take the rows
    of the pass. A slot that is in here may be committed to, by whatever pass, and dropped; not cut and filled again.

    Args:
        shape: of the slots.

    Attributes:
        kv_heads: of the model.
        end: the column at which the committed tokens of all members end.
        rows: for each session of the batch, the row of the rectangle that it has.
    """

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(shape.layers)])
        self.kv_heads = shape.kv_heads
        self.end = 0
        self.rows: list[int] = []
        self._shape = shape
        self._members: list[_Member] = []  # by row of the rectangle
        self._tree_rows: Sequence[int] = ()
        self._allocate(0, 0)

    @property
    def pads(self) -> list[int]:
        """Columns left of each session's tokens, in the order of the batch."""
        return [self._members[row].pad for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        """Tokens that each session has in the rectangle, in the order of the batch."""
        return [self._members[row].length for row in self.rows]

    def align(self, slots: Sequence[Slot], tree_rows: int) -> int:
        """Unpad, append, repad: what is committed in `slots` ends at one column, and `tree_rows` columns follow.

        Who was in the last pass keeps its row: its tokens are shifted where its pad changed, and the accepted ones are
        appended from its slot, where they lie in path order. Who was not is copied from its slot whole.

        Returns:
            Tokens moved; K and V of all layers each.
        """
        end = max(slot.committed_length for slot in slots)
        last, self._members = self._members, []  # where a move fails, nothing is left to be trusted
        if self._reserve(len(slots), end + tree_rows):
            last = []
        self.rows = _rows(last, slots)
        members: dict[int, _Member] = {}
        moved = 0
        for slot, row in zip(slots, self.rows, strict=True):
            pad = end - slot.committed_length
            member = last[row] if row < len(last) and last[row].slot() is slot else None
            if member is not None and member.length > slot.committed_length:
                member = None  # it was cut, and may have grown again in another way
            moved += self._load(row, slot, pad) if member is None else self._realign(row, slot, pad, member)
            members[row] = _Member(ref(slot), pad, slot.committed_length)
        self._members = [members[row] for row in range(len(slots))]
        self.end = end
        return moved

    def begin(self, tree_rows: Sequence[int]) -> None:
        """How many rows each session takes of what the model hands over next, in the order of the batch."""
        self._tree_rows = tree_rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [batch, kv_heads, rows, head_dim] of one layer behind the committed tokens, and into each slot its own.

        Returns:
            K and V of the layer, [batch, kv_heads, end + rows, head_dim].
        """
        batch, _, rows, _ = key_states.shape
        columns = self.end + rows
        keys, values = self._keys[layer_idx, :batch, :, :columns], self._values[layer_idx, :batch, :, :columns]
        keys[:, :, self.end :] = key_states
        values[:, :, self.end :] = value_states
        for row, own in zip(self.rows, self._tree_rows, strict=True):
            slot, mine = self._members[row].slot(), slice(row, row + 1)
            assert slot is not None  # its pass runs
            slot.write(layer_idx, key_states[mine, :, :own], value_states[mine, :, :own])
        return keys, values

    def check_content(self, slots: Sequence[Slot]) -> None:
        """Every row holds what its slot holds.

        Raises:
            SynchronisationError: one does not.
        """
        for index, (slot, row, pad) in enumerate(zip(slots, self.rows, self.pads, strict=True)):
            held = (table[:, row, :, pad : self.end] for table in (self._keys, self._values))
            for own, expected in zip(held, slot.committed(), strict=True):
                if not torch.allclose(own, expected, rtol=0, atol=0, equal_nan=True):
                    raise SynchronisationError(index, "its KV is not that of its slot")

    def _realign(self, row: int, slot: Slot, pad: int, member: _Member) -> int:
        """Shift a member to its new pad, and append what it has committed since."""
        shifted = 0
        if pad != member.pad:
            shifted = member.length
            for table in (self._keys, self._values):
                own = table[:, row]
                # The places overlap, hence the copy in between.
                own[:, :, pad : pad + shifted] = own[:, :, member.pad : member.pad + shifted].clone()
                own[:, :, member.pad : pad] = 0
        self._append(row, slot, pad, member.length)
        return shifted + slot.committed_length - member.length

    def _load(self, row: int, slot: Slot, pad: int) -> int:
        """Give a row to a session that was not in the last pass."""
        for table in (self._keys, self._values):
            table[:, row, :, :pad] = 0
        self._append(row, slot, pad, 0)
        return slot.committed_length

    def _append(self, row: int, slot: Slot, pad: int, length: int) -> None:
        """Copy the slot's committed tokens from the `length`-th on."""
        keys, values = slot.committed(length)
        target = slice(pad + length, pad + slot.committed_length)
        self._keys[:, row, :, target] = keys
        self._values[:, row, :, target] = values

    def _reserve(self, batch: int, columns: int) -> bool:
        """Room for so much; True where it is new, and empty."""
        _, has_batch, _, has_columns, _ = self._keys.shape
        if batch <= has_batch and columns <= has_columns:
            return False
        roomy = int(columns * (1 + SPARE_SHARE)) if columns > has_columns else 0
        self._allocate(max(batch, has_batch), max(roomy, has_columns))
        return True

    def _allocate(self, batch: int, columns: int) -> None:
        shape = self._shape
        size = (shape.layers, batch, shape.kv_heads, whole_blocks(columns), shape.head_dim)
        self._keys = self._values = torch.empty(0)  # let go of the old room first
        self._keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros(size, dtype=shape.dtype, device=shape.device)


def _rows(last: Sequence[_Member], slots: Sequence[Slot]) -> list[int]:
    """A row below ``len(slots)`` for each slot: its own of the last pass where it has one, else a free one."""
    own = {member.slot(): row for row, member in enumerate(last[: len(slots)])}
    taken = {own[slot] for slot in slots if slot in own}
    free = iter(row for row in range(len(slots)) if row not in taken)
    return [own[slot] if slot in own else next(free) for slot in slots]
