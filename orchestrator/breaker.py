"""Leaves a service that fails alone, for all requests of the process at once, and finds out when it is back.

Sessions report what they meet. A failure of the service opens the circuit; after a rest a probe is sent, for which no
request waits, and its success closes the circuit; so does any answer to a session. Each rest in a row is twice as long.
It knows neither messages nor what the service is for.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable

from eagle_pangu.serving.logs import get_logger

LONGEST_REST_SECONDS = 60.0
SILENCE = 2
"""Deadlines missed, with no answer to anyone meanwhile, that are no accident of one session."""

log = get_logger(__name__)


class CircuitBreaker:
    """Closed at first.

    Args:
        rest_seconds: first rest, and again after every answer; 0: never opens.
        probe: whether the service is back; returns within seconds, and never raises.
    """

    def __init__(self, rest_seconds: float, probe: Callable[[], Awaitable[bool]]) -> None:
        self._first_rest = self._rest = rest_seconds
        self._probe = probe
        self._recovery: asyncio.Task[None] | None = None
        self._answered_at = -float("inf")
        self._misses = 0  # since the last answer

    @property
    def is_open(self) -> bool:
        """No new session is to be opened."""
        return self._recovery is not None and not self._recovery.done()

    @property
    def is_silent(self) -> bool:
        """Nobody is answered: those that have a session need not ask either."""
        return self.is_open and self._misses >= SILENCE

    def answered(self) -> None:
        """A question was answered, in time or not."""
        self._answered_at = time.monotonic()
        self._misses = 0
        self._rest = self._first_rest
        if self._recovery is not None:
            self._recovery.cancel()
            self._recovery = None

    def missed(self, seconds: float, *, opened: bool) -> None:
        """A session waited so long in vain. opened: it had been opened, so that it may be alone in this."""
        if time.monotonic() - self._answered_at >= seconds:
            self._misses += 1 if opened else SILENCE
        if self._misses >= SILENCE:
            self.trip()

    def trip(self) -> None:
        """The service, not one session, failed just now."""
        if self._rest > 0 and not self.is_open:
            log.warning("circuit opened", rest_seconds=self._rest)
            # It outlives the request that trips it, so it must not log in that one's name.
            self._recovery = asyncio.create_task(self._recover(), context=contextvars.Context())

    async def _recover(self) -> None:
        back = False
        while not back:
            await asyncio.sleep(self._rest)
            self._rest = max(self._first_rest, min(2 * self._rest, LONGEST_REST_SECONDS))
            back = await self._probe()
        self._misses = 0
        log.info("circuit closed")
