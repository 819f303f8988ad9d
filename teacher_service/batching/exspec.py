"""EXSPEC: sequences of equal length share a pass without realignment; EQSPEC is the fallback where there are too few.

The second algorithm of "Batch Speculative Decoding Done Right", as a reference and for comparison. `pool` says who goes
together, `eqspec` computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.segment import Segment
from teacher_service.batching import Computed
from teacher_service.batching.eqspec import EqSpec
from teacher_service.batching.pool import SequencePool


class ExSpec:
    """See `Batching`.

    Args:
        window: waiting sequences looked at for a group of equal length, >= `group_size`.
        group_size: most sessions of a pass, >= 1.
    """

    name = "exspec"
    keeps_bits = EqSpec.keeps_bits
    mixes_prompts = EqSpec.mixes_prompts

    def __init__(self, window: int, group_size: int) -> None:
        self._pool = SequencePool(window, group_size)
        self._rectangular = EqSpec(group_size)

    def choose(self, verifications: Sequence[Waiting[Segment]], rows: int) -> list[Waiting[Segment]]:
        """A group of equal length, or the oldest; what is chosen may be left uncomputed, and chosen again."""
        return self._pool.group(verifications, rows)

    def compute(self, engine: Engine, segments: Sequence[Segment]) -> Computed:
        """One pass, as `EqSpec.compute`.

        A group of equal length has no padding and nothing of it is shifted, but its rectangle still holds a copy: who
        was not in the last pass is copied from its slot, and `realign_us` counts that. A group that stays together pays
        for its newly accepted tokens alone.
        """
        self._pool.passed()
        return self._rectangular.compute(engine, segments)
