"""Few shapes for a device on which each new one is dear: rows of a pass and lengths of slots, rounded up.

Rows that fill a pass up are computed and belong to nobody. With an attention that reads slots whole, every size of a
pass is one of a bucket; one that cuts K and V to the columns in use meets a new shape with every length. This is not
all that graph capture would ask for: the lengths that a fused call is told are integers of the host, and what `commit`
gathers and what copies of a prefix take have sizes of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle_pangu.speculation.plan import BLOCK, whole_blocks

SHORTEST_SLOT = 4 * BLOCK


@dataclass(frozen=True)
class Buckets:
    """Sizes that are used, ascending.

    rows: of a pass, and of a session in it. lengths: of slots, in columns.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def up_to(cls, rows: int, slot_capacity: int) -> Buckets:
        """Powers of two that reach so many rows, and powers of two of columns up to the longest slot."""
        longest = whole_blocks(slot_capacity)
        lengths = [SHORTEST_SLOT << step for step in range(longest.bit_length()) if SHORTEST_SLOT << step < longest]
        return cls(tuple(1 << step for step in range((rows - 1).bit_length() + 1)), (*lengths, longest))

    @property
    def fewest(self) -> tuple[int, ...]:
        """Of each bucket of rows, the fewest that are rounded up to it."""
        return (1, *(rows + 1 for rows in self.rows[:-1]))

    def rows_for(self, rows: int) -> int:
        """The smallest bucket that holds so many rows; past the largest one, a multiple of it."""
        if rows > self.rows[-1]:
            return -(-rows // self.rows[-1]) * self.rows[-1]
        return self.rows[bisect_left(self.rows, rows)]

    def together(self, rows: Sequence[int]) -> int:
        """How many of the first of some sessions share a pass, >= 1: as many as the last bucket of rows holds.

        Args:
            rows: of each session, which are rounded up first.
        """
        total = 0
        for place, own in enumerate(rows):
            total += self.rows_for(own)
            if place and total > self.rows[-1]:
                return place
        return len(rows)

    def length_for(self, columns: int) -> int:
        """The shortest slot that holds so many columns.

        Raises:
            ValueError: none does.
        """
        if columns > self.lengths[-1]:
            raise ValueError(f"expected at most {self.lengths[-1]} columns, got {columns}")
        return self.lengths[bisect_left(self.lengths, columns)]


@dataclass
class SeenShapes:
    """Distinct shapes of what a model computed, those of its warm-up and those met later."""

    warmed: int = 0
    met_later: int = 0
    _seen: set[tuple[object, ...]] = field(default_factory=set)
    _warm: bool = False

    def note(self, *shape: object) -> None:
        """What is computed, and its sizes."""
        if shape in self._seen:
            return
        self._seen.add(shape)
        if self._warm:
            self.met_later += 1
        else:
            self.warmed += 1

    def end_warm_up(self) -> None:
        """From here on a new shape makes a session wait."""
        self._warm = True
