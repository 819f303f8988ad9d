"""The algorithm: prefill, then propose, verify, accept, stop, emit, until the answer ends. Pure coordination.

    root <- prefill(prompt)
    repeat: tree <- draft.propose(answer, advised rows)    the root alone where there is no draft, or none pays
            path, next <- teacher.verify(tree, commit)     path: the drafted tokens that the teacher would decide itself
            kept <- stop rules(path + next)                commit <- path within kept; emitted while the next round runs

Each module named here does one step and says what it does when things go wrong; nothing goes wrong here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from orchestrator.counters import Counters
from orchestrator.draft import Fallback
from orchestrator.drafting import Drafted, Drafting
from orchestrator.failover import Decision, Teacher
from orchestrator.sessions import microseconds
from orchestrator.stops import Cut, End, StopRules
from orchestrator.trace import AnswerTrace
from protos.v1 import sampling_pb2


class Emission(NamedTuple):
    """What one step adds to the answer.

    pieces: one an id, the text that became final with it; it may lag behind the ids until the end. margins: one an id,
    in logits. logprobs: one an id where they are wanted, else none. end: None while the answer goes on.
    prompt_logprobs: with the first token where they are wanted, one a prompt token from the second on; else none.
    """

    token_ids: list[int]
    pieces: list[str]
    margins: list[float]
    logprobs: list[sampling_pb2.TokenLogprobs]
    end: End | None
    prompt_logprobs: Sequence[sampling_pb2.TokenLogprobs] = ()

    def by_token(self) -> list[Emission]:
        """The same in emissions of one token each."""
        last = len(self.token_ids) - 1
        return [
            Emission(
                self.token_ids[at : at + 1],
                self.pieces[at : at + 1],
                self.margins[at : at + 1],
                self.logprobs[at : at + 1],
                self.end if at == last else None,
                self.prompt_logprobs if at == 0 else (),
            )
            for at in range(last + 1)
        ]


class Rounds:
    """One answer on its way.

    Args:
        prompt_tokens: their number.
        teacher, drafting: not yet opened.
        rules: of this answer.
        trace: of this answer.

    Attributes:
        answer: Tokens emitted so far.
        counters: True at any moment, also when the answer fails.
    """

    def __init__(
        self, prompt_tokens: int, teacher: Teacher, drafting: Drafting, rules: StopRules, trace: AnswerTrace
    ) -> None:
        self.answer: list[int] = []
        self.counters = Counters()
        self._prompt_tokens = prompt_tokens
        self._teacher = teacher
        self._drafting = drafting
        self._rules = rules
        self._trace = trace

    async def run(self) -> AsyncGenerator[Emission]:
        """One emission for the first token, then one a round; the last one holds the end.

        Raises:
            ServiceError: the teacher cannot go on, for the reasons that `Teacher` gives.
        """
        want_features = await self._drafting.start()
        started = time.perf_counter()
        first = await self._teacher.open(want_features=want_features)
        self.counters.prefill_us = microseconds(time.perf_counter() - started)
        self.counters.cached_prompt_tokens = first.cached_tokens
        self.counters.drafter = self._drafting.drafter
        self._trace.epoch = self._teacher.epoch
        self._trace.open(first.token_id, self.counters)
        cut = self._rules.take([first.token_id])
        self.answer.append(first.token_id)

        rounds_started = started = time.perf_counter()
        number = 1
        ahead = await self._start(number, 0) if cut.end is None else None
        try:
            yield Emission([first.token_id], cut.pieces, [first.margin], first.logprobs, cut.end, first.prompt_logprobs)
            while ahead is not None:
                drafted, decision = await ahead
                accepted = decision.tree.token_ids[decision.accepted_rows].tolist()
                run = [*accepted, decision.next_token_id]
                cut = self._rules.take(run)
                commit = min(cut.kept, len(accepted))
                emitted = run[: cut.kept]
                self.answer += emitted
                self._trace.epoch = self._teacher.epoch
                now = time.perf_counter()
                seconds, started = now - started, now
                number += 1
                ahead = await self._start(number, commit) if cut.end is None else None
                self.counters.rounds_us = microseconds(now - rounds_started)
                self._count(drafted, decision, cut, commit, seconds)
                margins, logprobs = decision.margins[: cut.kept], decision.logprobs[: cut.kept]
                yield Emission(emitted, cut.pieces, margins, logprobs, cut.end)
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _start(self, number: int, commit: int) -> asyncio.Task[tuple[Drafted, Decision]]:
        """Send a round on its way: what is left to do for the one before it (trace, emission) costs no time then."""
        task = asyncio.create_task(self._decide(number, commit))
        # Its first message goes out now: one step of the loop queues it, the next one writes it.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def _decide(self, number: int, commit: int) -> tuple[Drafted, Decision]:
        depth, advised_rows = self._rules.left - 1, self._teacher.advised_rows
        drafted = await self._drafting.propose(number, self.answer, depth, advised_rows)
        return drafted, await self._teacher.verify(drafted.tree, commit, self.answer)

    def _count(self, drafted: Drafted, decision: Decision, cut: Cut, commit: int, seconds: float) -> None:
        fallback = drafted.fallback
        if decision.reopened and drafted.tree.drafted:
            fallback = Fallback.TEACHER_LOST
        times = drafted.times.plus(decision.times)
        self.counters.count_round(
            drafted=decision.tree.drafted,
            accepted=commit,
            fallback=fallback,
            load_limited=drafted.load_limited,
            times=times,
        )
        self.counters.drafter = self._drafting.drafter
        if self._trace.enabled:
            self._trace.round(
                number=self.counters.rounds,
                committed_length=self._prompt_tokens + len(self.answer) - cut.kept - 1,
                tree=decision.tree,
                accepted_rows=decision.accepted_rows,
                next_token_id=decision.next_token_id,
                kept=cut.kept,
                fallback=fallback,
                load_limited=drafted.load_limited,
                reopened=decision.reopened,
                batch=decision.batch,
                times=times,
                round_us=microseconds(seconds),
            )
