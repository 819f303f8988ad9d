"""The batch ablation over scripted services: what is measured in which order, and what is in the files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from eagle_pangu.evaluation import batch_ablation
from eagle_pangu.evaluation.asking import Asker, AskError, RequestLimits
from eagle_pangu.evaluation.batch_ablation import AblationSettings, ablate_batch
from eagle_pangu.evaluation.batch_table import BatchRow, ResultsError
from eagle_pangu.evaluation.load_run import LoadSettings
from eagle_pangu.evaluation.teacher_state import Free, Passes, TeacherState
from eagle_pangu.serving.settings import Settings
from tests.evaluation.scripted_orchestrator import ScriptedOrchestrator, serving, usual_answer


class CountingWatch:
    """Every look finds as much more as one pass of two sessions did, a quarter of it realignment."""

    def __init__(self, batching: str) -> None:
        self._batching = batching
        self._looks = 0

    async def state(self) -> TeacherState:
        self._looks += 1
        passes = Passes(*(self._looks * each for each in (1, 2, 10, 12, 4000, 1000)), longest_wait_us=5)
        return TeacherState(self._batching, passes, Free(1, 1), Free(1, 1))


@dataclasses.dataclass
class Scripted:
    """Stands in for `on_services`: a scripted orchestrator for each batching. `fails`: for this one, at this size."""

    fails: tuple[str, int] | None = None
    launched: list[Settings] = dataclasses.field(default_factory=list)
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    async def on_services(
        self,
        services: Settings,
        server: str | None,
        output: Path,
        work: Callable[[Any], Coroutine[Any, Any, None]],
        on_state: object,
    ) -> None:
        self.launched.append(services)
        batching = services.teacher.batching

        def answer(options: Any) -> list[int]:
            if self.fails == (batching, _size(options.request_id)):
                raise ValueError("at fault")
            self.asked.append((batching, options.request_id))
            return usual_answer(options)

        with serving(ScriptedOrchestrator(answer=answer)) as target:
            await work(UnderTest(target, CountingWatch(batching)))


@dataclasses.dataclass
class UnderTest:
    target: str
    watch: CountingWatch

    @asynccontextmanager
    async def connected(self, limits: RequestLimits) -> AsyncIterator[tuple[Asker, CountingWatch]]:
        async with grpc.aio.insecure_channel(self.target) as channel:
            yield Asker(channel, limits), self.watch


def _size(request_id: str) -> int | None:
    """Of "ngram-8-0", the request 0 of that drafter's load of size 8."""
    drafter, *numbers = request_id.split("-")
    return int(numbers[0]) if drafter != "warmup" and len(numbers) == 2 and numbers[0].isdecimal() else None


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    monkeypatch.setattr(batch_ablation, "on_services", scripted.on_services)
    return scripted


def settings(output: Path, **fields: Any) -> AblationSettings:
    load = {"dtype": "float32", "numerics": "free", "limit": 3, "max_tokens": 4, "rows": 4, "depth": 2}
    arguments = {"sizes": (1, 2), "batchings": ("ragged", "eqspec"), "drafters": ("ngram",), **fields}
    return AblationSettings(LoadSettings(output, concurrency=2, **load), **arguments)  # type: ignore[arg-type]


def results(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return content


def cells(output: Path) -> list[list[str]]:
    lines = (output / "table.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


async def test_every_batching_has_its_processes_and_all_its_sizes_in_them(tmp_path: Path, scripted: Scripted) -> None:
    shown: list[BatchRow] = []
    rows = await ablate_batch(settings(tmp_path, drafters=("ngram", "none")), on_row=shown.append)
    assert rows == shown
    expected = [
        (batching, drafter, size)
        for batching in ("ragged", "eqspec")
        for drafter in ("ngram", "none")
        for size in (1, 2)
    ]
    assert [row.key for row in rows] == expected
    assert [services.teacher.batching for services in scripted.launched] == ["ragged", "eqspec"]
    references = [batching for batching, request_id in scripted.asked if request_id.startswith("reference")]
    assert references == ["ragged"] * 3  # by the first processes alone
    assert len(scripted.asked) == 3 + 2 + 3 * len(expected)
    assert all((row.exact_match, row.partial_match, row.failures) == (1, 1, ()) for row in rows)
    assert all((row.sessions_per_pass, row.realignment_share) == (2, 0.25) for row in rows)
    assert rows == [BatchRow(**{**row, "failures": ()}) for row in results(tmp_path)["rows"]]
    summary = json.loads((tmp_path / "eqspec" / "none-2.json").read_text())
    assert (summary["concurrency"], summary["drafter"], summary["first_divergences"]) == (2, "none", [])
    assert len((tmp_path / "eqspec" / "none-2.jsonl").read_text().splitlines()) == 3


async def test_the_table_has_the_ratio_over_batch_1_of_the_same_batching_and_drafter(
    tmp_path: Path, scripted: Scripted
) -> None:
    rows = await ablate_batch(settings(tmp_path))
    head, _, *lines = cells(tmp_path)
    assert [line[:3] for line in lines] == [[row.batching, row.drafter, str(row.size)] for row in rows]
    ratios = [line[head.index("over batch 1")] for line in lines]
    expected = [rows[place].tokens_per_second / rows[place // 2 * 2].tokens_per_second for place in range(4)]
    assert ratios == [f"{ratio:.2f}" for ratio in expected]
    assert {line[head.index("realignment")] for line in lines} == {"25.0%"}
    assert {line[head.index("exact")] for line in lines} == {"100.0%"}
    assert all(len(line) == len(head) for line in lines)


async def test_an_interrupted_ablation_keeps_what_it_has_and_goes_on(tmp_path: Path, scripted: Scripted) -> None:
    scripted.fails = ("eqspec", 2)
    with pytest.raises(AskError, match="ngram-2-"):
        await ablate_batch(settings(tmp_path))
    kept = [("ragged", 1), ("ragged", 2), ("eqspec", 1)]
    assert [(row["batching"], row["size"]) for row in results(tmp_path)["rows"]] == kept
    assert len(cells(tmp_path)) == 2 + 3
    with pytest.raises(ResultsError, match="--resume"):
        await ablate_batch(settings(tmp_path))
    scripted.fails = None
    scripted.launched.clear()
    scripted.asked.clear()
    rows = await ablate_batch(settings(tmp_path, resume=True))
    assert [(row.batching, row.size, row.run) for row in rows] == [(*key, 1) for key in kept] + [("eqspec", 2, 2)]
    assert [services.teacher.batching for services in scripted.launched] == ["eqspec"]
    assert [request_id for _, request_id in scripted.asked if request_id.startswith("reference")] == []
    head, _, *lines = cells(tmp_path)
    assert [line[head.index("over batch 1")].endswith("*") for line in lines] == [False, False, False, True]
    assert "an earlier start of the command" in (tmp_path / "table.md").read_text()


async def test_rows_of_other_settings_are_refused_by_name(tmp_path: Path, scripted: Scripted) -> None:
    await ablate_batch(settings(tmp_path, batchings=("ragged",)))
    other = settings(tmp_path, resume=True)
    other = dataclasses.replace(other, load=dataclasses.replace(other.load, max_tokens=5))
    with pytest.raises(ResultsError, match="max_tokens: expected 5, as in this run, got 4"):
        await ablate_batch(other)
    more = await ablate_batch(settings(tmp_path, resume=True, sizes=(1, 2, 3)))
    assert len(more) == 6


async def test_under_bitwise_only_ragged_runs_and_the_table_says_so(tmp_path: Path, scripted: Scripted) -> None:
    bitwise = settings(tmp_path, batchings=("ragged", "eqspec", "exspec"))
    bitwise = dataclasses.replace(bitwise, load=dataclasses.replace(bitwise.load, numerics="bitwise"))
    rows = await ablate_batch(bitwise)
    assert {row.batching for row in rows} == {"ragged"}
    text = (tmp_path / "table.md").read_text()
    assert "eqspec: not run" in text
    assert "exspec: not run" in text


def test_the_processes_hold_the_largest_batch_and_offer_every_drafter(tmp_path: Path) -> None:
    many = settings(tmp_path, sizes=(1, 100), drafters=("none", "ngram", "hybrid"), batchings=("eqspec", "exspec"))
    services = {name: many.of(name).services() for name in many.batchings}
    assert {each.teacher.slots for each in services.values()} == {100}
    assert {each.draft.drafter for each in services.values()} == {"hybrid"}
    assert services["eqspec"].teacher.group_size == 100
    assert services["exspec"].teacher.group_size == 8
    assert many.notes == (
        "eqspec: at most 100 sessions in a pass.",
        "exspec: at most 8 sessions in a pass, of one length where so many of 48 are.",
    )


@pytest.mark.parametrize(
    ("fields", "load", "named"),
    [
        ({}, {"numerics": "auto"}, "numerics: expected bitwise or free, for all batchings alike, got auto"),
        ({"batchings": ("eqspec", "exspec")}, {"numerics": "bitwise"}, "batching: none of eqspec, exspec can keep"),
        ({"drafters": ("ngram", "ngram")}, {}, "drafter: expected each once, got ngram, ngram"),
    ],
)
def test_a_table_that_would_be_empty_or_mean_something_else_is_refused(
    tmp_path: Path, fields: dict[str, Any], load: dict[str, Any], named: str
) -> None:
    whole = settings(tmp_path)
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(whole, load=dataclasses.replace(whole.load, **load), **fields)


def test_a_batch_of_more_than_there_are_prompts_is_refused(tmp_path: Path) -> None:
    assert len(settings(tmp_path, sizes=(1, 3)).items()) == 3
    with pytest.raises(ValueError, match="sizes: expected at most 3, the number of prompts, got 4"):
        settings(tmp_path, sizes=(1, 4)).items()
