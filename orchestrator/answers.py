"""All answers to one request: the prompt is read for the first of them, then they run side by side.

Each is a session of its own, with a seed of its own. The others open once the first one's prompt is read, so that the
teacher may start them from its KV. Where the teacher has no room for one of them, it is asked again when another one is
over: with fewer slots than answers they come one after the other. It knows no messages.
"""

from __future__ import annotations

import asyncio
import contextvars
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


async def _merged(
    streams: list[AsyncGenerator[Emission]], begin_again: Callable[[int], AsyncGenerator[Emission]]
) -> AsyncGenerator[tuple[int, Emission]]:
    """The emissions of streams, the others begun once the first one has given one; an error of any ends all.

    But for one: a stream that finds no room waits for one of the others to end, as long as one of them runs.
    """
    contexts = [contextvars.copy_context() for _ in streams]
    for index, context in enumerate(contexts):
        context.run(structlog.contextvars.bind_contextvars, answer=index)  # its logs name it
    coming: dict[asyncio.Task[Emission], int] = {}
    running: set[int] = set()  # have given something, and go on
    waiting: list[int] = []
    over = 0
    over_when_asked: dict[int, int] = {}

    def ask(index: int) -> None:
        over_when_asked.setdefault(index, over)
        coming[asyncio.create_task(_next(streams[index]), context=contexts[index])] = index

    ask(0)
    others = range(1, len(streams))
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=coming.__getitem__):
                index = coming.pop(task)
                try:
                    emission = task.result()
                except ResourceExhaustedError as error:
                    freed = over > over_when_asked.pop(index)
                    if index in running or not (running or freed):
                        raise
                    log.info("an answer waits for another one's slot", waiting=index, reason=str(error))
                    if freed:
                        streams[index] = begin_again(index)
                        ask(index)
                    else:
                        waiting.append(index)
                    continue
                running.add(index)
                if emission.end is None:
                    ask(index)
                else:
                    await streams[index].aclose()
                    running.discard(index)
                    over += 1
                    for each in waiting:
                        streams[each] = begin_again(each)
                        ask(each)
                    waiting.clear()
                for other in others:
                    ask(other)
                others = range(0)
                yield index, emission
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Emission]) -> Emission:
    return await anext(stream)
