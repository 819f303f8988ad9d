"""Deterministic shards of a list of prompts, so that n machines measure disjoint parts of one workload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, index from 1: every count-th item, so all parts see the whole spread of a file."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``"2/4"`` is the second of four parts.

        Raises:
            ValueError: not of that form, or index outside 1 .. count.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None:
            raise ValueError(f"shard: expected i/n, as in 2/4, got {text!r}")
        shard = cls(int(match[1]), int(match[2]))
        if not 1 <= shard.index <= shard.count:
            raise ValueError(f"shard: expected 1 <= i <= n, got {text!r}")
        return shard

    def of(self, items: Sequence[T]) -> list[T]:
        """The items of this part, in order. The parts are disjoint and together hold every item once."""
        return list(items[self.index - 1 :: self.count])


WHOLE = Shard()
