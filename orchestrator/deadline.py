"""When a request must be over, on the monotonic clock."""

from __future__ import annotations

import time


class Deadline:
    """A point in time, or none.

    Args:
        seconds: from now; None: no deadline.
    """

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Seconds left, negative once passed; None: no deadline."""
        return None if self._at is None else self._at - time.monotonic()
