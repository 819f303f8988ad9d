"""EQSPEC: sessions in order of arrival, realigned to a rectangle before every pass.

The first algorithm of "Batch Speculative Decoding Done Right", as a reference and for comparison: the ragged batches of
this project move nothing. The layout of a pass is `eagle_pangu.speculation.layouts.rectangular`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.layouts.rectangle import Rectangle
from eagle_pangu.speculation.layouts.rectangular import RectangularLayout
from eagle_pangu.speculation.plan import ForwardPlan
from eagle_pangu.speculation.segment import Segment
from teacher_service.batching import Computed


class EqSpec:
    """See `Batching`. Its rectangle outlives the passes: who stays in the batch is shifted, not copied anew.

    Args:
        group_size: most sessions of a pass, >= 1.
    """

    name = "eqspec"
    keeps_bits = False  # columns of a rectangle lie where the others' lengths put them, not in fixed blocks
    mixes_prompts = False

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._rectangle: Rectangle | None = None

    def choose(self, verifications: Sequence[Waiting[Segment]], rows: int) -> list[Waiting[Segment]]:
        """The oldest, as many as fit."""
        return oldest(verifications, self._group_size, rows)

    def compute(self, engine: Engine, segments: Sequence[Segment]) -> Computed:
        """Realign, then one pass; `realign_us` is all that moves KV between passes, copies of newcomers too.

        Raises:
            ValueError: the engine's numerics are `bitwise`, which a rectangle cannot keep.
            SynchronisationError: an invariant is broken.
        """
        if engine.numerics.policy != "free":
            raise ValueError(f"numerics: expected free, since a rectangle keeps no bits, got {engine.numerics.policy}")
        if self._rectangle is None:
            self._rectangle = Rectangle(engine.cache_shape)
        rectangle, slots = self._rectangle, [segment.slot for segment in segments]
        longest = max(segment.tree.rows for segment in segments)
        engine.device.synchronize()
        begun = time.perf_counter_ns()
        moved = rectangle.align(slots, longest)
        engine.device.synchronize()
        realign_us = (time.perf_counter_ns() - begun) // 1000 if moved else 0
        if engine.numerics.mode == "reference":
            rectangle.check_content(slots)
        assert engine.attention is not None  # free
        attention = engine.attention.masked

        def arrange(_: Sequence[Segment], plans: Sequence[ForwardPlan]) -> RectangularLayout:
            return RectangularLayout(rectangle, plans, attention)

        results = engine.run(segments, arrange)
        return Computed(results, len(segments) * longest, realign_us)


def oldest(waiting: Sequence[Waiting[Segment]], most: int, rows: int) -> list[Waiting[Segment]]:
    """The longest run from the front whose rectangle fits: at most `most` sessions, and `rows` rows with the padding.

    One at least, whatever its rows.
    """
    longest = 0
    for count, each in enumerate(waiting[:most]):
        longest = max(longest, each.request.rows)
        if count and (count + 1) * longest > rows:
            return list(waiting[:count])
    return list(waiting[:most])
