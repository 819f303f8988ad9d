"""All answers to one request: the prompt is read for the first of them, then they run side by side.

Each is a session of its own, with a seed of its own. The others open once the first one's prompt is read, so that the
teacher may start them from its KV. None of them waits for another after that: with fewer slots than answers they come
one after the other. It knows no messages.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from orchestrator.deadline import Deadline
from orchestrator.generation import Generation, Services
from orchestrator.requests import Request
from orchestrator.rounds import Emission
from orchestrator.token_bytes import TokenBytes


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
        async with aclosing(_merged([generation.run() for generation in self.generations])) as steps:
            async for step in steps:
                yield step


async def _merged(streams: list[AsyncGenerator[Emission]]) -> AsyncGenerator[tuple[int, Emission]]:
    """The emissions of streams, the others begun once the first one has given one; an error of any ends all."""
    contexts = [contextvars.copy_context() for _ in streams]
    for index, context in enumerate(contexts):
        context.run(structlog.contextvars.bind_contextvars, answer=index)  # its logs name it
    coming: dict[asyncio.Task[Emission], int] = {}

    def ask(index: int) -> None:
        coming[asyncio.create_task(_next(streams[index]), context=contexts[index])] = index

    ask(0)
    others = range(1, len(streams))
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=coming.__getitem__):
                index, emission = coming.pop(task), task.result()
                if emission.end is None:
                    ask(index)
                else:
                    await streams[index].aclose()
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
