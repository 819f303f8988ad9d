"""An endurance load: sessions of very different lengths that come, and leave early, at random, for a length of time.

What comes is drawn from a seed; here are the draws, and the figures that only such a load has. `soak_run` runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from eagle_pangu.evaluation.load import LoadedPhase, Request
from eagle_pangu.evaluation.load_summary import LoadSummary
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.records import Answer
from eagle_pangu.evaluation.teacher_state import Free

SHORTEST_PROMPT = 20  # characters
CANCELLED_SHARE = 0.5  # of the requests; those that end sooner are not cancelled after all
CANCEL_SECONDS = (0.002, 30.0)  # from before the teacher has heard of it to deep in a long answer
MEAN_PAUSE_SECONDS = 0.5  # of a client, between an answer and its next request
MEMORY_SLACK_MIB = 64.0  # allocators keep pages that nobody holds any more

Clock = Callable[[], float]


def uneven_prompts(items: Sequence[PromptItem], longest: int, seed: int) -> list[PromptItem]:
    """As many prompts as items, of 20 to `longest` characters: pieces of the items' texts, one after another.

    Lengths are drawn so that every order of magnitude comes as often.
    """
    random = np.random.default_rng(seed)
    texts = [turn for item in items for turn in item.turns]
    prompts: list[PromptItem] = []
    for place in range(len(items)):
        length = int(np.exp(random.uniform(np.log(SHORTEST_PROMPT), np.log(longest))))
        pieces: list[str] = []
        while sum(map(len, pieces)) < length:
            pieces += [texts[index] for index in random.permutation(len(texts))]
        prompts.append(PromptItem(f"soak-{place}", "soak", ("\n\n".join(pieces)[:length],)))
    return prompts


class Draw(NamedTuple):
    """One session as the seed has it: index of its prompt, tokens asked for, when its caller leaves, in seconds (None:
    it stays), and how long the client pauses before."""

    prompt: int
    max_tokens: int
    cancel_after: float | None
    pause: float


def draws(prompts: int, longest: int, seed: int) -> Iterator[Draw]:
    """Sessions without end, over so many prompts, of 1 to `longest` tokens; short ones come more often than long."""
    random = np.random.default_rng([seed, 1])
    while True:
        # As many draws for every session, whatever they say, so that each depends on the seed and its place alone.
        prompt, leaves = int(random.integers(prompts)), random.random() < CANCELLED_SHARE
        max_tokens = round(float(np.exp(random.uniform(0, np.log(longest)))))
        cancel_after = float(np.exp(random.uniform(*np.log(CANCEL_SECONDS))))
        pause = float(random.exponential(MEAN_PAUSE_SECONDS))
        yield Draw(prompt, max_tokens, cancel_after if leaves else None, pause)


def requests_until(
    deadline: float,
    prompts: Sequence[PromptItem],
    references: Sequence[Answer],
    drafter: str,
    drawn: Iterator[Draw],
    clock: Clock = time.monotonic,
) -> Iterator[Request]:
    """A request for each draw, until the clock passes the deadline."""
    for place, draw in enumerate(drawn):
        if clock() >= deadline:
            return
        yield Request(
            item=prompts[draw.prompt],
            reference=references[draw.prompt],
            drafter=drafter,
            request_id=f"soak-{place}",
            max_tokens=draw.max_tokens,
            cancel_after=draw.cancel_after,
            pause=draw.pause,
        )


class Memory(NamedTuple):
    """What a process held in RAM, in MiB, with sessions only at `halfway`; None where the system does not tell."""

    before: float | None
    halfway: float | None
    after: float | None

    @property
    def grows(self) -> bool:
        """Sessions leave something behind: more is held without them at the end than with them halfway."""
        if self.halfway is None or self.after is None:
            return False
        return self.after > self.halfway + MEMORY_SLACK_MIB


@dataclass(frozen=True)
class SoakSummary:
    """The figures of an endurance run.

    load: of all its sessions; an answer that was cancelled is exact when it is a prefix of its reference. finished,
    cancelled: sessions; cancelled_before_first_token: of the cancelled ones. free_before, free_after: of the teacher.
    memory_mib: by service. failures: those of the load, and what was not given back.
    """

    load: LoadSummary
    finished: int
    cancelled: int
    cancelled_before_first_token: int
    free_before: Free
    free_after: Free
    memory_mib: dict[str, Memory]
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The object of summary.json, without what the runner adds."""
        return asdict(self)


def summarise_soak(
    load: LoadSummary, phase: LoadedPhase, before: Free, after: Free, memory: dict[str, Memory]
) -> SoakSummary:
    """The figures of a phase whose load is summed up already.

    Args:
        load: the figures of `phase`.
        phase: what happened.
        before: free in the teacher before the first session.
        after: free in it after the last, once it had the time to end them.
        memory: by service.
    """
    cancelled = [record for record in phase.records if record.cancelled]
    kept = [
        f"the teacher has {now} free {what}, {then} before the load: sessions that ended still hold them"
        for what, now, then in (("slots", after.slots, before.slots), ("KV tokens", after.kv_tokens, before.kv_tokens))
        if now != then
    ]
    kept += [
        f"the {name} holds {its.after:.0f} MiB without sessions, {its.halfway:.0f} with them halfway"
        for name, its in memory.items()
        if its.grows
    ]
    return SoakSummary(
        load=load,
        finished=len(phase.records) - len(cancelled),
        cancelled=len(cancelled),
        cancelled_before_first_token=sum(not record.streamed.arrivals for record in cancelled),
        free_before=before,
        free_after=after,
        memory_mib=memory,
        failures=(*load.failures, *kept),
    )
