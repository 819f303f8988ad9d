"""Rows of all sessions one after the other, nothing padded and nothing moved: the default (DESIGN §8)."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.segment import Segment
from teacher_service.batching import Computed


class Ragged:
    """See `Batching`."""

    name = "ragged"
    keeps_bits = True
    mixes_prompts = True

    def choose(self, verifications: Sequence[Waiting[Segment]], rows: int) -> list[Waiting[Segment]]:
        """The oldest ones: nobody is overtaken by a smaller tree."""
        taken = 0
        for place, each in enumerate(verifications):
            taken += each.request.rows
            if taken > rows and place > 0:
                return list(verifications[:place])
        return list(verifications)

    def compute(self, engine: Engine, segments: Sequence[Segment]) -> Computed:
        """See `Batching.compute`."""
        results = engine.run(segments)
        return Computed(results, sum(result.rows for result in results), 0)
