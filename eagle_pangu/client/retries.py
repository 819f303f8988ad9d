"""Whether a failed call is made again, and after how long a wait: what both clients share of it.

Does no I/O and knows nothing of what is asked; what a broken stream had delivered is `resumption`'s matter.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from eagle_pangu.serving.errors import retry_seconds_of

RETRIED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED})
"""Another attempt may fare better. Any other status would come again, or means that the caller wants no more."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and how patiently.

    Attributes:
        attempts: Most attempts of one call, the first included; >= 1. 1: no retries.
        first_backoff_seconds: Longest wait before the second attempt; > 0. It doubles for each one after.
        most_backoff_seconds: What it stops doubling at; >= first_backoff_seconds. A wait that the server names in
            google.rpc.RetryInfo is kept to as it is.

    Raises:
        ValueError: A value is out of range.
    """

    attempts: int = 3
    first_backoff_seconds: float = 0.2
    most_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Refuse what is out of range, not-a-number included."""
        if not self.attempts >= 1:
            raise ValueError(f"attempts: expected at least 1, got {self.attempts}")
        if not self.first_backoff_seconds > 0:
            raise ValueError(f"first_backoff_seconds: expected more than 0, got {self.first_backoff_seconds}")
        if not self.first_backoff_seconds <= self.most_backoff_seconds < float("inf"):
            raise ValueError(
                f"most_backoff_seconds: expected a finite number >= first_backoff_seconds "
                f"({self.first_backoff_seconds}), got {self.most_backoff_seconds}"
            )

    def backoff_seconds(self, failures: int, jitter: float) -> float:
        """The wait after so many failed attempts.

        Args:
            failures: >= 1.
            jitter: 0 .. 1, by chance: half of the wait hangs on it, so that clients that failed together do not come
                back together.
        """
        longest = self.first_backoff_seconds
        for _ in range(failures - 1):
            longest = min(2 * longest, self.most_backoff_seconds)
        return longest * (1 + jitter) / 2


class Attempts:
    """The attempts of one call, all of them under the caller's one deadline.

    Args:
        policy: how many, how patiently.
        seconds: until the deadline; None: there is none.
        clock: monotonic seconds.
    """

    def __init__(self, policy: RetryPolicy, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._deadline = None if seconds is None else clock() + seconds
        self._failures = 0

    def seconds_left(self) -> float | None:
        """What gRPC is told as the limit of the next attempt; None: no limit."""
        return None if self._deadline is None else self._deadline - self._clock()

    def pause_after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            grpc.RpcError: `error` itself, where no attempt is to follow: its status is none of RETRIED, the attempts
                are used up, or the wait would outlast the deadline.
        """
        self._failures += 1
        if error.code() not in RETRIED or self._failures >= self._policy.attempts:
            raise error
        pause = _named_by_server(error)
        if pause is None:
            pause = self._policy.backoff_seconds(self._failures, random.random())
        left = self.seconds_left()
        if left is not None and pause >= left:
            raise error
        return pause


def _named_by_server(error: grpc.RpcError) -> float | None:
    """Seconds to wait, never below 0; None where the server named none."""
    try:
        seconds = retry_seconds_of(error)
    except DecodeError:  # a proxy's bytes; the caller should read the error, not this
        return None
    return None if seconds is None else max(0.0, seconds)
