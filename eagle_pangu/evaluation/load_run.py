"""One whole load run: references, load, figures, files. Launches the three processes, or uses a server.

It knows files and processes and leaves the asking to `load`, the figures to `load_summary`, the terminal to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from eagle_pangu.evaluation.arrivals import Load
from eagle_pangu.evaluation.asking import Asker, RequestLimits, Teacher
from eagle_pangu.evaluation.bench import write_summary
from eagle_pangu.evaluation.load import LoadRecord, OnRecord, every_item, loaded
from eagle_pangu.evaluation.load_summary import LoadSummary, summarise_load
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.records import Answer, Message
from eagle_pangu.evaluation.references import (
    REFERENCE_FILE,
    OnAnswer,
    ReferenceKey,
    read_references,
    references,
    require_all,
)
from eagle_pangu.evaluation.run import TRACE_FILE, RunSettings
from eagle_pangu.evaluation.services_under_test import ServicesUnderTest, on_services
from eagle_pangu.serving.configuration import load_settings
from eagle_pangu.serving.settings import Settings
from eagle_pangu.serving.trio import OnState

ANSWERS_FILE = "answers.jsonl"

LONGEST_QUEUE_SECONDS = 3600.0
"""Arrivals faster than the machine wait for as long as it takes; how long is what the run is to show."""


@dataclass(frozen=True)
class LoadSettings(RunSettings):
    """One load run. The first turn of every item is asked, alone and teacher-only first, then under load.

    concurrency, arrival_rate, seed: see `Load`. reference: folder of an earlier run whose reference answers are taken.
    group_size: most sessions of a pass of eqspec and exspec.
    """

    concurrency: int | None = None
    arrival_rate: float | None = None
    seed: int = 0
    reference: Path | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.load()
        if self.against_transformers or self.against_prompt_lookup:
            raise ValueError("against_transformers: nothing of a load run; give neither concurrency nor arrival rate")

    def load(self) -> Load:
        """How the requests come.

        Raises:
            ValueError: neither a concurrency nor a rate, or one out of range.
        """
        return Load(self.concurrency, self.arrival_rate, self.seed)

    def services(self) -> Settings:
        """As of every run, with the limits of the services raised where the load would meet them.

        Raises:
            SettingsError: a value that they do not take.
        """
        configured, overrides = super().services(), self.overrides()
        # Without a bound requests wait for a slot, which is what such a load is to show; none may be turned away.
        open_at_most = self.concurrency or len(self.items())
        overrides["teacher"]["slots"] = max(configured.teacher.slots, self.concurrency or 1)
        overrides["teacher"]["queue_limit"] = max(configured.teacher.queue_limit, open_at_most)
        overrides["teacher"]["queue_seconds"] = max(configured.teacher.queue_seconds, LONGEST_QUEUE_SECONDS)
        if self.group_size is not None:
            overrides["teacher"]["group_size"] = self.group_size
        overrides["draft"]["slots"] = max(configured.draft.slots, open_at_most)
        overrides["orchestrator"]["max_concurrent"] = max(configured.orchestrator.max_concurrent, open_at_most)
        overrides["orchestrator"]["teacher_deadline_seconds"] = max(
            configured.orchestrator.teacher_deadline_seconds, LONGEST_QUEUE_SECONDS
        )
        return load_settings(overrides=overrides)


async def run_load(
    settings: LoadSettings,
    *,
    on_state: OnState = lambda name, state: None,
    on_reference: OnAnswer = lambda item_id, answer: None,
    on_record: OnRecord = lambda record: None,
) -> LoadSummary:
    """Ask everything alone, then under load; write the files, return the figures.

    Args:
        settings: of the run.
        on_state: told of every step of the processes; not called with a server of the caller's.
        on_reference: called after each reference answer that was asked for.
        on_record: called after each answer under load.

    Raises:
        AskError, PromptFileError, SettingsError, ModelError, ProcessDiedError, TimeoutError, ReferenceMismatchError:
            the run could not be made; the lines of the answers before are written.
        ValueError: a load or shard without meaning.
    """
    items, load, services = settings.items(), settings.load(), settings.services()
    clear(settings.output)

    async def measured(under_test: ServicesUnderTest) -> LoadSummary:
        async with under_test.connected(limits_of(settings, services)) as (asker, watch):
            teacher = await asker.teacher()
            answers = await reference_answers(asker, teacher, items, settings, on_reference)
            await warm_up(asker, items, settings)
            with (settings.output / ANSWERS_FILE).open("w", encoding="utf-8") as file:
                requests = every_item(items, answers, settings.drafter, settings.max_tokens, "load")
                phase = await loaded(asker, watch, requests, load, written_to(file, on_record))
        return summarise_load(phase, teacher.numerics, settings.drafter, near_tie=settings.near_tie_margin)

    summary = await on_services(services, settings.server, settings.output, measured, on_state)
    launched = None if settings.server else services.model_dump(mode="json")
    write_summary(settings.output, summary.to_json(), {**settings.to_json(), "services": launched})
    return summary


def clear(output: Path) -> None:
    """The folder of a run, without the trace of an earlier one."""
    output.mkdir(parents=True, exist_ok=True)
    (output / TRACE_FILE).unlink(missing_ok=True)  # the orchestrator appends


def limits_of(settings: RunSettings, services: Settings) -> RequestLimits:
    """What every request of the run asks for."""
    return RequestLimits(settings.max_tokens, services.orchestrator.rows, services.orchestrator.depth)


async def reference_answers(
    asker: Asker,
    teacher: Teacher,
    items: Sequence[PromptItem],
    settings: LoadSettings,
    on_reference: OnAnswer,
) -> list[Answer]:
    """The reference of every item: of the earlier run that the settings name, or asked now.

    Raises:
        ReferenceMismatchError: the earlier run's do not belong to this one.
        AskError: an item got no answer.
    """
    key = ReferenceKey.of(teacher, settings.max_tokens)
    known: dict[str, Answer] = {}
    if settings.reference is not None:
        path = settings.reference / REFERENCE_FILE
        known = read_references(path, key)
        require_all(path, known, items)
    path = settings.output / REFERENCE_FILE
    return await references(asker, items, key, path, known=known, on_answer=on_reference)


async def warm_up(asker: Asker, items: Sequence[PromptItem], settings: RunSettings) -> None:
    """The run's number of answers that are thrown away."""
    for count in range(settings.warmup):
        messages = [Message("user", items[count % len(items)].turns[0])]
        await asker.ask(messages, settings.drafter, f"warmup-{count}")


def written_to(file: TextIO, on_record: OnRecord) -> OnRecord:
    """A line a record, flushed at once, and then the other."""

    def write(record: LoadRecord) -> None:
        file.write(json.dumps(record.line()) + "\n")
        file.flush()
        on_record(record)

    return write
