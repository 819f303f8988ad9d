"""Leaves a broken service alone for a while, for all requests of the process at once."""

from __future__ import annotations

import time


class CircuitBreaker:
    """Open after a failure, closed again once the rest is over.

    Args:
        rest_seconds: how long a failure keeps it open.
    """

    def __init__(self, rest_seconds: float) -> None:
        self._rest_seconds = rest_seconds
        self._closes_at = -float("inf")

    @property
    def is_open(self) -> bool:
        """The service is to be left alone."""
        return time.monotonic() < self._closes_at

    def trip(self) -> None:
        """The service failed just now."""
        self._closes_at = time.monotonic() + self._rest_seconds
