"""Work that hangs, told from work that takes its time."""

from __future__ import annotations

import time


def stall(busy_since: float | None, most_seconds: float) -> str | None:
    """What is to be said of work that began at `busy_since`, in seconds of `time.monotonic`; None: it is in order.

    Args:
        busy_since: None: no work runs.
        most_seconds: longer than that is a stall.
    """
    if busy_since is None:
        return None
    seconds = time.monotonic() - busy_since
    return f"one piece of work has been running for {seconds:.1f} s" if seconds > most_seconds else None
