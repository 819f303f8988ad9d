"""One whole endurance run: the three processes, references, sessions for so long, and whether all was given back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from eagle_pangu.evaluation.bench import write_summary
from eagle_pangu.evaluation.load import OnRecord, loaded
from eagle_pangu.evaluation.load_run import (
    ANSWERS_FILE,
    LoadSettings,
    clear,
    limits_of,
    reference_answers,
    warm_up,
    written_to,
)
from eagle_pangu.evaluation.load_summary import summarise_load
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.references import OnAnswer
from eagle_pangu.evaluation.services_under_test import ServicesUnderTest, on_services
from eagle_pangu.evaluation.soak import Memory, SoakSummary, draws, requests_until, summarise_soak, uneven_prompts
from eagle_pangu.evaluation.teacher_state import resident_mib
from eagle_pangu.serving.trio import OnState, Trio

SETTLE_SECONDS = 30.0  # for the teacher to notice that the last sessions are gone


@dataclass(frozen=True)
class SoakSettings(LoadSettings):
    """One endurance run; `concurrency` clients, in a closed loop with pauses.

    soak_seconds: no session starts later; those that run then end as they would. longest_prompt: in characters; the
    items' texts are the material. `max_tokens` is the longest answer.
    """

    soak_seconds: float = 600.0
    longest_prompt: int = 8000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server is not None or self.arrival_rate is not None or self.concurrency is None:
            raise ValueError(
                "soak: expected a concurrency, no arrival rate, and no server, which cannot be looked into"
            )
        if not 0 < self.soak_seconds < float("inf"):
            raise ValueError(f"soak_seconds: expected a time above 0, got {self.soak_seconds}")

    def items(self) -> list[PromptItem]:
        """Prompts of very different lengths, as many as the file, its limit and its shard leave items."""
        return uneven_prompts(super().items(), self.longest_prompt, self.seed)


async def run_soak(
    settings: SoakSettings,
    *,
    on_state: OnState = lambda name, state: None,
    on_reference: OnAnswer = lambda item_id, answer: None,
    on_record: OnRecord = lambda record: None,
) -> SoakSummary:
    """Compute the references, load the services for so many seconds, and see that everything is given back.

    Arguments and errors as for `run_load`.
    """
    items, services = settings.items(), settings.services()
    clear(settings.output)

    async def measured(under_test: ServicesUnderTest) -> SoakSummary:
        assert under_test.trio is not None
        trio = under_test.trio
        async with under_test.connected(limits_of(settings, services)) as (asker, watch):
            assert watch is not None
            teacher = await asker.teacher()
            references = await reference_answers(asker, teacher, items, settings, on_reference)
            await warm_up(asker, items, settings)
            before, halfway = _resident(trio), asyncio.create_task(_resident_after(settings.soak_seconds / 2, trio))
            free = (await watch.settled(SETTLE_SECONDS)).free
            drawn = draws(len(items), settings.max_tokens, settings.seed)
            deadline = time.monotonic() + settings.soak_seconds
            requests = requests_until(deadline, items, references, settings.drafter, drawn)
            try:
                with (settings.output / ANSWERS_FILE).open("w", encoding="utf-8") as file:
                    phase = await loaded(asker, watch, requests, settings.load(), written_to(file, on_record))
                free_after = (await watch.settled(SETTLE_SECONDS)).free
                memory = _by_service(before, await halfway, _resident(trio))
            finally:
                halfway.cancel()
        summary = summarise_load(phase, teacher.numerics, settings.drafter, near_tie=settings.near_tie_margin)
        return summarise_soak(summary, phase, free, free_after, memory)

    summary = await on_services(services, None, settings.output, measured, on_state)
    write_summary(
        settings.output,
        summary.to_json(),
        {**settings.to_json(), "services": services.model_dump(mode="json")},
    )
    return summary


async def _resident_after(seconds: float, trio: Trio) -> dict[str, float | None]:
    await asyncio.sleep(seconds)
    return _resident(trio)


def _resident(trio: Trio) -> dict[str, float | None]:
    return {name: resident_mib(process.pid) for name, process in vars(trio).items()}


def _by_service(*moments: dict[str, float | None]) -> dict[str, Memory]:
    return {name: Memory(*(moment[name] for moment in moments)) for name in moments[0]}
