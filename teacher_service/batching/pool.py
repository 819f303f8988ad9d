"""The sequences that wait, and which of them EXSPEC's next pass takes ("Batch Speculative Decoding Done Right").

Those of one committed length form a rectangle without padding, so they go together where they can. It computes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.segment import Segment
from teacher_service.batching.eqspec import oldest

PASSED_OVER = 4
"""So many passes may take a younger sequence and not the oldest; then the oldest go first, whatever their lengths."""


class SequencePool:
    """Sequences in order of arrival; the window is the oldest of them.

    A group of equal length is taken only where it holds as many sessions as the oldest ones would (the fallback), so
    that alignment never costs the pass its width: also at the end of a run, where fewer than a full group wait.

    A sequence behind k others waits for at most ``PASSED_OVER + k // group_size`` passes, where the row budget lets a
    group be full.

    Args:
        window: sequences looked at, >= `group_size`.
        group_size: most sequences of a group, >= 1.

    Raises:
        ValueError: the window is smaller than a group.
    """

    def __init__(self, window: int, group_size: int) -> None:
        if window < group_size:
            raise ValueError(f"window: expected at least the group size ({group_size}), got {window}")
        self._window = window
        self._group_size = group_size
        self._passed_over: Counter[_Key] = Counter()  # of those that wait: passes that took a younger one
        self._skipped: set[_Key] = set()  # whom the group last chosen passes over

    def group(self, waiting: Sequence[Waiting[Segment]], rows: int) -> list[Waiting[Segment]]:
        """Who is in the next pass: the first group of one length that is full, else the oldest.

        Args:
            waiting: all who wait, in order of arrival, >= 1; who is not among them has left.
            rows: most rows of the pass; see `oldest`.
        """
        present = {_key(each) for each in waiting}
        self._passed_over = Counter({key: times for key, times in self._passed_over.items() if key in present})
        window = waiting[: self._window]
        chosen = oldest(window, self._group_size, rows)
        if self._passed_over[_key(window[0])] < PASSED_OVER:
            chosen = self._full_group(window, rows, len(chosen)) or chosen
        keys = [_key(each) for each in window]
        taken = {_key(each) for each in chosen}
        youngest = max(index for index, key in enumerate(keys) if key in taken)
        self._skipped = {key for key in keys[:youngest] if key not in taken}
        return chosen

    def passed(self) -> None:
        """The group last chosen has been computed."""
        self._passed_over.update(self._skipped)
        self._skipped = set()

    def _full_group(self, window: Sequence[Waiting[Segment]], rows: int, size: int) -> list[Waiting[Segment]] | None:
        """The first group of one length with at least `size` members, if any, in the order of their oldest."""
        by_length: dict[int, list[Waiting[Segment]]] = {}
        for each in window:
            by_length.setdefault(each.request.slot.committed_length, []).append(each)
        groups = (oldest(members, self._group_size, rows) for members in by_length.values())
        return next((group for group in groups if len(group) >= size), None)


_Key = tuple[Hashable, float]
"""A session and since when it waits: once it was served and comes again, it is another one."""


def _key(waiting: Waiting[Segment]) -> _Key:
    return waiting.session, waiting.since
