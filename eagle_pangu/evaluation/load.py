"""Requests under load beside their references: sent, timed token by token, the teacher's counters read around them.

It writes nothing and sums nothing up. What is asked, and how it comes, is the caller's; `load_summary` makes figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_pangu.evaluation.arrivals import Load, Work, under_load
from eagle_pangu.evaluation.asking import CANCELLED, Asker
from eagle_pangu.evaluation.exactness import partial_match
from eagle_pangu.evaluation.latency import StreamedAnswer
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.records import Answer, Message, TurnRecord
from eagle_pangu.evaluation.references import shortened
from eagle_pangu.evaluation.teacher_state import Passes, TeacherWatch

FIRST_TURN = 1


@dataclass(frozen=True)
class Request:
    """One request of a load.

    reference: the teacher-only answer to the item's first turn, of at least `max_tokens` unless it ends before.
    cancel_after: seconds after which the caller leaves; None: it stays. pause: seconds before it comes.
    """

    item: PromptItem
    reference: Answer
    drafter: str
    request_id: str
    max_tokens: int
    cancel_after: float | None = None
    pause: float = 0.0


@dataclass(frozen=True)
class LoadRecord:
    """One request answered under load. turn: the answer beside the reference, cut to what was asked and heard."""

    turn: TurnRecord
    streamed: StreamedAnswer

    @property
    def cancelled(self) -> bool:
        """Its caller left before the end."""
        return self.streamed.answer.finish_reason == CANCELLED

    def line(self) -> dict[str, Any]:
        """The object that answers.jsonl holds for this request."""
        answer = self.streamed.answer
        return {
            "id": self.turn.id,
            "request_id": answer.request_id,
            "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "exact": self.turn.exact,
            "partial": partial_match(self.turn) if answer.token_ids else None,
            "drafter": answer.drafter,
            "rounds": answer.rounds,
            "load_limited_rounds": answer.load_limited_rounds,
            "fallback_rounds": answer.fallback_rounds,
            "seconds": answer.seconds,
            "arrivals": [list(arrival) for arrival in self.streamed.arrivals],
        }


@dataclass(frozen=True)
class LoadedPhase:
    """A load from its first request to its last answer.

    records: in the order of the requests. seconds: of the whole. batching, passes: the teacher's own, of this phase;
    None where its address is not known.
    """

    load: Load
    records: tuple[LoadRecord, ...]
    seconds: float
    batching: str | None = None
    passes: Passes | None = None


OnRecord = Callable[[LoadRecord], None]


def every_item(
    items: Sequence[PromptItem], references: Sequence[Answer], drafter: str, max_tokens: int, name: str
) -> list[Request]:
    """One request an item, with ids that begin with `name`."""
    pairs = zip(items, references, strict=True)
    return [
        Request(item, reference, drafter, f"{name}-{place}", max_tokens)
        for place, (item, reference) in enumerate(pairs)
    ]


async def loaded(
    asker: Asker,
    watch: TeacherWatch | None,
    requests: Iterable[Request],
    load: Load,
    on_record: OnRecord = lambda record: None,
) -> LoadedPhase:
    """Send all requests under that load, and wait for every answer.

    Args:
        asker: of the orchestrator.
        watch: of its teacher; None: its passes stay unknown.
        requests: read as the load goes on.
        load: how they come.
        on_record: called after each answer, in the order in which they end.

    Raises:
        AskError: a request got no answer; the others are cancelled.
    """

    def work_on(request: Request) -> Work[LoadRecord]:
        async def work(arrived: float) -> LoadRecord:
            await asyncio.sleep(request.pause)
            record = await _asked(asker, request, arrived + request.pause)
            on_record(record)
            return record

        return work

    before = None if watch is None else await watch.state()
    started = time.perf_counter()
    records = await under_load((work_on(request) for request in requests), load)
    seconds = time.perf_counter() - started
    if watch is None or before is None:
        return LoadedPhase(load, tuple(records), seconds)
    after = await watch.state()
    return LoadedPhase(load, tuple(records), seconds, after.batching, after.passes.since(before.passes))


async def _asked(asker: Asker, request: Request, arrived: float) -> LoadRecord:
    streamed = await asker.ask_streamed(
        [Message("user", request.item.turns[0])],
        request.drafter,
        request.request_id,
        arrived=arrived,
        max_tokens=request.max_tokens,
        cancel_after=request.cancel_after,
    )
    expected = shortened(request.reference, request.max_tokens, "length")
    if streamed.answer.finish_reason == CANCELLED:
        expected = shortened(expected, len(streamed.answer.token_ids), CANCELLED)
    return LoadRecord(TurnRecord(request.item.id, FIRST_TURN, expected, streamed.answer), streamed)
