"""How many sessions the service holds at once. For one event loop; what a session is, is not known here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from eagle_pangu.serving.errors import ResourceExhaustedError

RETRY_SECONDS = 1.0  # what a refused opener is told to wait; its request goes on without a draft meanwhile


class Slots:
    """A fixed number of slots and no queue: a draft that comes late is of no use.

    Args:
        total: slots in all.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._in_use = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """One slot for the length of the block.

        Raises:
            ResourceExhaustedError: all are in use.
        """
        if self._in_use == self._total:
            raise ResourceExhaustedError(f"all {self._total} draft sessions are in use", RETRY_SECONDS)
        self._in_use += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_use -= 1
            if self._in_use == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Return once no slot is in use."""
        await self._idle.wait()
