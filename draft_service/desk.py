"""A drafter and the thread that alone calls it, whose passes its sessions share.

What sessions ask for is computed as soon as the thread is free, in one pass all that waits, as far as the drafter takes
it at once: whoever comes in the middle of another's proposal joins at its next level, and nobody waits for company. It
knows neither messages nor gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any

from draft_service.drafters.base import Drafter, DraftSession
from draft_service.drafters.registry import DRAFTERS
from draft_service.opening import Opening
from draft_service.session import FeatureRows, Question, Session
from eagle_pangu.serving.batch_worker import BatchWorker, Chosen, Finished, Plan, Waiting
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.tree import TokenTree


class Desk:
    """One drafter's; also the `Batcher` of its thread.

    Args:
        name: of the drafter.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._drafter: Drafter[Any, Any] | None = None
        self._worker: BatchWorker[Any, Any] = BatchWorker(name, self)

    @property
    def drafter(self) -> Drafter[Any, Any]:
        """Loaded."""
        assert self._drafter is not None
        return self._drafter

    @property
    def busy_since(self) -> float | None:
        """Start of the pass or the call that runs now, in seconds of `time.monotonic`; None when none does."""
        return self._worker.heartbeat().busy_since

    async def load(self, settings: DraftSettings) -> None:
        """Load the drafter, on the thread that will call it: some settings of a device are a thread's own.

        Raises:
            DrafterError: it cannot be loaded.
        """
        self._drafter = (await self._worker.run(self, partial(DRAFTERS[self._name], settings))).value

    @asynccontextmanager
    async def open(self, opening: Opening) -> AsyncIterator[Session]:
        """A session for the length of the block."""
        memory = ExitStack()

        def begin() -> DraftSession[Any, Any]:
            return memory.enter_context(closing(self.drafter.open(opening.prompt, opening.max_budget)))

        # Closing is work like any other: it waits its turn behind whatever a cancelled caller left running.
        try:
            draft = (await self._worker.run(opening, begin)).value
            yield Session(opening, draft, reads_features=self.drafter.needs_features)
        finally:
            self._worker.submit(opening, memory.close)

    async def read_features(self, session: Session, rows: FeatureRows) -> None:
        """Hand over features; see `Session.read_features`."""
        await self._worker.run(session.opening, partial(session.read_features, rows))

    async def advance(self, session: Session) -> None:
        """All pending work of a session."""
        await self._worker.step(session.opening, session.advance)

    async def propose(
        self, session: Session, question: Question, features: Sequence[FeatureRows]
    ) -> Finished[TokenTree]:
        """The tree of a round; see `Session.propose`."""
        return await self._worker.step(session.opening, partial(session.propose, question, features))

    async def close(self) -> None:
        """End the thread."""
        await self._worker.close()

    def plan(self, waiting: Sequence[Waiting[Any]], now: float) -> Plan[Any]:
        """See `Batcher`: those that have waited longest, as many as share a pass."""
        most = self.drafter.together([each.request for each in waiting])
        return Plan([Chosen(each, each.request) for each in waiting[:most]])

    def compute(self, chosen: Sequence[Chosen[Any]]) -> Sequence[Any]:
        """See `Batcher`."""
        return self.drafter.compute([each.request for each in chosen])
