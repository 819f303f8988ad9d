"""How the trees of several sessions share a forward pass: one module a way, chosen by `teacher.batching`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.engine import Engine, ForwardResult
from eagle_pangu.speculation.segment import Segment


class Computed(NamedTuple):
    """One pass.

    results: of each segment, in order. computed_rows: rows that the model computed, padding included. realign_us: spent
    on moving KV of earlier rounds so that the batch is rectangular, in microseconds.
    """

    results: list[ForwardResult]
    computed_rows: int
    realign_us: int


class Batching(Protocol):
    """One way of sharing passes. Called on the worker's thread alone.

    Attributes:
        name: as in the configuration.
        keeps_bits: a row's logits have the same bits in any company under `bitwise` numerics; a way that does not keep
            them computes under `free` alone.
        mixes_prompts: chunks of prompts may stand beside the trees of a pass; else they have passes of their own.
    """

    name: str
    keeps_bits: bool
    mixes_prompts: bool

    def choose(self, verifications: Sequence[Waiting[Segment]], rows: int) -> list[Waiting[Segment]]:
        """Which of the waiting trees, in order of arrival, make the next pass: at most `rows` rows, at least one."""
        ...

    def compute(self, engine: Engine, segments: Sequence[Segment]) -> Computed:
        """One pass over their rows."""
        ...
