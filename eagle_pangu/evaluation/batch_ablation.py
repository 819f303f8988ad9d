"""The batch ablation: every batching, in processes of its own, under every batch size, beside the same references.

A load of batch size n is n clients in a closed loop over the same prompts. What is measured is written at once, and an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from eagle_pangu.evaluation.arrivals import Load
from eagle_pangu.evaluation.asking import Asker, Teacher
from eagle_pangu.evaluation.batch_table import RESULTS_FILE, BatchRow, ResultsError, read_results, write_results
from eagle_pangu.evaluation.load import OnRecord, every_item, loaded
from eagle_pangu.evaluation.load_run import LoadSettings, clear, limits_of, warm_up, written_to
from eagle_pangu.evaluation.load_summary import LoadSummary, summarise_load
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.records import Answer
from eagle_pangu.evaluation.references import REFERENCE_FILE, OnAnswer, ReferenceKey, read_references, references
from eagle_pangu.evaluation.services_under_test import ServicesUnderTest, on_services
from eagle_pangu.evaluation.teacher_state import TeacherWatch
from eagle_pangu.serving.settings import HEAD_DRAFTERS
from eagle_pangu.serving.trio import OnState

SIZES = (1, 2, 4, 8, 16, 32)
BATCHINGS = ("ragged", "eqspec", "exspec")
GROUPED_BATCHINGS = ("eqspec", "exspec")
BITWISE_BATCHINGS = ("ragged",)  # the others pad, so a row's company decides its shape

OnRow = Callable[[BatchRow], None]


@dataclass(frozen=True)
class AblationSettings:
    """load: what all loads have in common; its output is the folder of the whole. sizes: requests at once, ascending.

    resume: go on with the rows of an earlier start.
    """

    load: LoadSettings
    sizes: tuple[int, ...] = SIZES
    batchings: tuple[str, ...] = BATCHINGS
    drafters: tuple[str, ...] = ("hybrid",)
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse a table that would be empty, or hold other rows than it says.

        Raises:
            ValueError: names the setting.
        """
        if self.load.numerics not in ("bitwise", "free"):
            raise ValueError(f"numerics: expected bitwise or free, for all batchings alike, got {self.load.numerics}")
        if not self.possible:
            raise ValueError(f"batching: none of {', '.join(self.batchings)} can keep the bits of a row under bitwise")
        if len({*self.drafters}) < len(self.drafters):
            raise ValueError(f"drafter: expected each once, got {', '.join(self.drafters)}")

    def items(self) -> list[PromptItem]:
        """What is asked.

        Raises:
            ValueError: the largest batch would never be full.
        """
        items = self.load.items()
        if max(self.sizes) > len(items):
            raise ValueError(f"sizes: expected at most {len(items)}, the number of prompts, got {max(self.sizes)}")
        return items

    @property
    def possible(self) -> tuple[str, ...]:
        """The batchings that can run under these numerics."""
        if self.load.numerics != "bitwise":
            return self.batchings
        return tuple(name for name in self.batchings if name in BITWISE_BATCHINGS)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the table must say beside its figures."""
        skipped = [name for name in self.batchings if name not in self.possible]
        return (
            *(f"{name}: not run, it cannot keep the bits of a row under `bitwise`." for name in skipped),
            *(_group_note(name, self.of(name)) for name in self.possible if name in GROUPED_BATCHINGS),
        )

    @property
    def rows(self) -> int:
        """Lines of the whole table."""
        return len(self.possible) * len(self.drafters) * len(self.sizes)

    def of(self, batching: str) -> LoadSettings:
        """The run of one batching's processes: they offer every drafter, and hold the largest batch."""
        return replace(
            self.load,
            batching=batching,
            # The service offers those that need a model only where its own default is one of them.
            drafter=max(self.drafters, key=lambda name: (name in HEAD_DRAFTERS, name == "standalone")),
            concurrency=max(self.sizes),
            # Its batch is all who wait. exspec chooses among more than a group, and its group is configured.
            group_size=max(self.sizes) if batching == "eqspec" else None,
            output=self.load.output / batching,
        )

    def to_json(self) -> dict[str, Any]:
        """What rows must have in common to stand in one table."""
        varied = {"output", "batching", "drafter", "concurrency"}
        return {name: value for name, value in self.load.to_json().items() if name not in varied}


async def ablate_batch(
    settings: AblationSettings,
    *,
    on_state: OnState = lambda name, state: None,
    on_reference: OnAnswer = lambda item_id, answer: None,
    on_record: OnRecord = lambda record: None,
    on_row: OnRow = lambda row: None,
) -> list[BatchRow]:
    """Measure every row that is not there yet; the files are written anew after each.

    Args:
        settings: of the whole.
        on_state: told of every step of the processes.
        on_reference: called after each reference answer that was asked for.
        on_record: called after each answer under load.
        on_row: called with each row, those of an earlier start first.

    Raises:
        ResultsError: the folder holds results and `resume` is not set, or they are of other settings.
        AskError, PromptFileError, SettingsError, ModelError, ProcessDiedError, TimeoutError, ReferenceMismatchError:
            the run could not be made; the rows before are written.
    """
    sweep = _Sweep(settings, _earlier(settings))
    for row in sweep.rows:
        on_row(row)

    async def in_own_processes(batching: str) -> None:
        run = settings.of(batching)
        services, items = run.services(), run.items()
        clear(run.output)

        async def measured(under_test: ServicesUnderTest) -> None:
            async with under_test.connected(limits_of(run, services)) as (asker, watch):
                assert watch is not None
                teacher = await asker.teacher()
                answers = await sweep.references(asker, teacher, items, on_reference)
                await warm_up(asker, items, run)
                for drafter, size in sweep.left(batching):
                    one = replace(run, drafter=drafter, concurrency=size)
                    on_row(sweep.add(one, await _load(one, asker, watch, teacher, items, answers, on_record)))

        await on_services(services, None, run.output, measured, on_state)

    for batching in settings.possible:
        if sweep.left(batching):
            await in_own_processes(batching)
    write_results(settings.load.output, sweep.rows, settings.notes, settings.to_json())
    return sweep.rows


class _Sweep:
    """The rows until now, on disk at every moment."""

    def __init__(self, settings: AblationSettings, earlier: list[BatchRow]) -> None:
        self.rows = earlier
        self._settings = settings
        self._run = 1 + max((row.run for row in earlier), default=0)

    def left(self, batching: str) -> list[tuple[str, int]]:
        """Drafters and sizes of that batching without a row, sizes in their order."""
        there = {row.key for row in self.rows}
        wanted = [(drafter, size) for drafter in self._settings.drafters for size in self._settings.sizes]
        return [each for each in wanted if (batching, *each) not in there]

    def add(self, one: LoadSettings, summary: LoadSummary) -> BatchRow:
        """A row more. Its whole summary, every divergence in it, lies beside its answers."""
        row = BatchRow.of(one.batching or "", one.concurrency or 1, self._run, summary)
        path = one.output / f"{_name(one)}.json"
        path.write_text(json.dumps(summary.to_json(), indent=2) + "\n", encoding="utf-8")
        self.rows.append(row)
        write_results(self._settings.load.output, self.rows, self._settings.notes, self._settings.to_json())
        return row

    async def references(
        self, asker: Asker, teacher: Teacher, items: list[PromptItem], on_reference: OnAnswer
    ) -> list[Answer]:
        """Asked of the first processes, read from the file by all others."""
        path = self._settings.load.output / REFERENCE_FILE
        key = ReferenceKey.of(teacher, self._settings.load.max_tokens)
        known = read_references(path, key) if path.exists() else {}
        return await references(asker, items, key, path, known=known, on_answer=on_reference)


async def _load(
    one: LoadSettings,
    asker: Asker,
    watch: TeacherWatch,
    teacher: Teacher,
    items: list[PromptItem],
    answers: list[Answer],
    on_record: OnRecord,
) -> LoadSummary:
    requests = every_item(items, answers, one.drafter, one.max_tokens, _name(one))
    with (one.output / f"{_name(one)}.jsonl").open("w", encoding="utf-8") as file:
        phase = await loaded(asker, watch, requests, Load(one.concurrency), written_to(file, on_record))
    return summarise_load(phase, teacher.numerics, one.drafter, near_tie=one.near_tie_margin)


def _name(one: LoadSettings) -> str:
    return f"{one.drafter}-{one.concurrency}"


def _group_note(batching: str, run: LoadSettings) -> str:
    teacher = run.services().teacher
    window = f", of one length where so many of {teacher.window} are" if batching == "exspec" else ""
    return f"{batching}: at most {teacher.group_size} sessions in a pass{window}."


def _earlier(settings: AblationSettings) -> list[BatchRow]:
    output = settings.load.output
    output.mkdir(parents=True, exist_ok=True)
    if settings.resume:
        return read_results(output, settings.to_json()) if (output / RESULTS_FILE).exists() else []
    if (output / RESULTS_FILE).exists():
        raise ResultsError(f"{output / RESULTS_FILE}: there are results already; --resume goes on with them")
    (output / REFERENCE_FILE).unlink(missing_ok=True)
    return []
