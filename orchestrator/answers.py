"""All answers to one request: the prompt is read for the first of them, then they run side by side.

Each is a session of its own, with a seed of its own. The others open once the first one's prompt is read, so that the
teacher may start them from its KV. Where the teacher has no room for one of them, it is asked again when another one is
over, and from time to time: with fewer slots than answers they come one after the other. It knows no messages.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import structlog

from eagle_pangu.serving.errors import ResourceExhaustedError
from eagle_pangu.serving.logs import get_logger
from orchestrator.deadline import Deadline
from orchestrator.generation import Generation, Services
from orchestrator.requests import Request
from orchestrator.rounds import Emission
from orchestrator.token_bytes import TokenBytes

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
TRIES = 8
"""Of answers without room while none has any: with the pauses between them they take some 4.5 s."""

log = get_logger(__name__)


class Answers:
    """As many as the request asks for.

    Args:
        request: of the caller.
        services: to ask them of.
        deadline: of the request.

    Attributes:
        generations: One an answer, in their order.
    """

    def __init__(self, request: Request, services: Services, deadline: Deadline) -> None:
        self.request = request
        self.generations = [
            Generation(request.of_answer(index), services, deadline, index) for index in range(request.answers)
        ]
        self._services = services
        self._deadline = deadline

    @property
    def token_bytes(self) -> TokenBytes:
        """Of the teacher's vocabulary."""
        return self._services.model.tokenizer.token_bytes

    async def run(self) -> AsyncGenerator[tuple[int, Emission]]:
        """The emissions of all answers as they come, each with the index of its answer; the first one is of answer 0.

        However it ends, every session is over then. No answer runs ahead of the caller by more than two rounds.

        Raises:
            ServiceError: one of them cannot go on; the others are given up.
        """
        if len(self.generations) == 1:  # nothing to merge, and no task a round to pay for
            async with aclosing(self.generations[0].run()) as emissions:
                async for emission in emissions:
                    yield 0, emission
            return
        async with aclosing(_merged([generation.run() for generation in self.generations], self._begin_again)) as steps:
            async for step in steps:
                yield step

    def _begin_again(self, index: int) -> AsyncGenerator[Emission]:
        """A new attempt at an answer that has not begun."""
        generation = Generation(self.request.of_answer(index), self._services, self._deadline, index)
        self.generations[index] = generation
        return generation.run()


class _WithoutRoom:
    """Answers that the teacher refused for want of room, and when it is asked again for all of them.

    At once when another answer is over, and after pauses that grow: the teacher frees a slot a little later than it
    ends the session, and other requests free theirs at any time.

    Attributes:
        tries: So often they were asked for again since an answer was last over.
    """

    def __init__(self) -> None:
        self.tries = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._refusals: dict[int, ResourceExhaustedError] = {}
        self._due = math.inf

    @property
    def refusal(self) -> ResourceExhaustedError | None:
        """One of those that wait."""
        return next(iter(self._refusals.values()), None)

    @property
    def seconds(self) -> float | None:
        """Until they are due; None: nothing waits."""
        return max(0.0, self._due - time.monotonic()) if self._refusals else None

    def add(self, index: int, refusal: ResourceExhaustedError) -> None:
        """One more that waits."""
        log.info("an answer waits for another one's slot", waiting=index, reason=str(refusal))
        if not self._refusals:
            self._due = time.monotonic() + self._pause
        self._refusals[index] = refusal

    def one_is_over(self) -> None:
        """There is, or will be in a moment, room for another one."""
        self.tries, self._pause, self._due = 0, FIRST_PAUSE_SECONDS, time.monotonic()

    def take_due(self) -> list[int]:
        """Those to ask for now."""
        if not self._refusals or time.monotonic() < self._due:
            return []
        due = list(self._refusals)
        self.tries += 1
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._refusals.clear()
        return due


async def _merged(
    streams: list[AsyncGenerator[Emission]], begin_again: Callable[[int], AsyncGenerator[Emission]]
) -> AsyncGenerator[tuple[int, Emission]]:
    """The emissions of streams, the others begun once the first one has given one; an error of any ends all.

    But for one: a stream that finds no room is begun again, as long as any other one may have some.
    """
    contexts = [contextvars.copy_context() for _ in streams]
    for index, context in enumerate(contexts):
        context.run(structlog.contextvars.bind_contextvars, answer=index)  # its logs name it
    coming: dict[asyncio.Task[Emission], int] = {}  # whoever has room, or was not refused yet, is among them
    without_room = _WithoutRoom()
    begun: set[int] = set()

    def ask(index: int) -> None:
        coming[asyncio.create_task(_next(streams[index]), context=contexts[index])] = index

    ask(0)
    try:
        while coming or without_room.refusal:
            for task in await _done(coming, without_room.seconds):
                index = coming.pop(task)
                try:
                    emission = task.result()
                except ResourceExhaustedError as refusal:
                    if index in begun or not begun:  # it lost its place, or the first one found none
                        raise
                    without_room.add(index, refusal)
                    continue
                if emission.end is None:
                    ask(index)
                else:
                    await streams[index].aclose()
                    without_room.one_is_over()
                if not begun:
                    for other in range(1, len(streams)):
                        ask(other)
                begun.add(index)
                yield index, emission
            if without_room.refusal and not coming and without_room.tries >= TRIES:
                raise without_room.refusal
            for index in without_room.take_due():
                streams[index] = begin_again(index)
                ask(index)
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _done(coming: dict[asyncio.Task[Emission], int], seconds: float | None) -> list[asyncio.Task[Emission]]:
    """Those that are done, in the order of their answers, after the first one or after so many seconds."""
    if not coming:
        assert seconds is not None
        await asyncio.sleep(seconds)
        return []
    done, _ = await asyncio.wait(coming, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return sorted(done, key=coming.__getitem__)


async def _next(stream: AsyncGenerator[Emission]) -> Emission:
    return await anext(stream)
