"""`eagle-pangu bench` under load from flags to files, over a real gRPC server whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import typer
from typer.testing import CliRunner, Result

from eagle_pangu.cli.bench import bench as bench_command
from eagle_pangu.evaluation.arrivals import Load
from eagle_pangu.evaluation.asking import Asker, AskError, RequestLimits
from eagle_pangu.evaluation.load import LoadedPhase, Request, loaded
from eagle_pangu.evaluation.load_run import LoadSettings
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.records import Answer, Message
from eagle_pangu.evaluation.soak_run import SoakSettings
from eagle_pangu.evaluation.teacher_state import Free, Passes, TeacherState
from protos.v1 import generation_pb2
from tests.evaluation.scripted_orchestrator import ScriptedOrchestrator, serving, usual_answer

app = typer.Typer()
app.command()(bench_command)

SUMMARY_FIELDS = {
    "requests",
    "concurrency",
    "tokens_per_second",
    "exact_match",
    "partial_match",
    "first_divergences",
    "tokens_per_round",
    "load_limited_share",
    "time_to_first_token_ms",
    "between_tokens_ms",
    "longest_wait_ms",
    "passes",
    "time_shares",
    "numerics",
    "settings",
    "versions",
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    items = [{"id": f"item-{n}", "source": "test", "turns": [f"Question {n}.", "And more."]} for n in range(6)]
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def bench(orchestrator: ScriptedOrchestrator, prompts: Path, output: Path, *flags: str) -> Result:
    with serving(orchestrator) as target:
        arguments = ["--server", target, "--prompts", str(prompts), "--output", str(output), "--warmup", "0", *flags]
        return CliRunner().invoke(app, arguments, catch_exceptions=False)


def files(output: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    return lines, json.loads((output / "summary.json").read_text(encoding="utf-8"))


def leaving_at(position: int, *, text: str = "") -> Any:
    """Answers under load whose ids differ from one position on, those of one prompt or of all."""

    def answer(options: generation_pb2.GenerationOptions) -> list[int]:
        ids = usual_answer(options)
        if options.drafter == "none" or text not in options.chat.messages[0].content:
            return ids
        return [*ids[:position], 999, *ids[position + 1 :]]

    return answer


@pytest.mark.parametrize("flags", [["--concurrency", "4"], ["--arrival-rate", "1000"]])
def test_first_turns_are_asked_alone_and_then_under_load(prompts: Path, tmp_path: Path, flags: list[str]) -> None:
    orchestrator = ScriptedOrchestrator()
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "8", *flags)
    assert result.exit_code == 0, result.output
    asked = [(options.drafter, options.chat.messages[-1].content) for options in orchestrator.requests]
    questions = [f"Question {n}." for n in range(6)]
    assert asked[:6] == [("none", question) for question in questions]
    assert sorted(asked[6:]) == [("ngram", question) for question in questions]
    lines, summary = files(tmp_path / "out")
    assert sorted(line["id"] for line in lines) == [f"item-{n}" for n in range(6)]
    assert all(line["exact"] and line["partial"] == 1 for line in lines)
    assert all([tokens for _, tokens in line["arrivals"]] == [1, 2, 2, 2, 1] for line in lines)
    assert summary.keys() >= SUMMARY_FIELDS
    assert (summary["requests"], summary["tokens"], summary["exact_match"], summary["partial_match"]) == (6, 48, 1, 1)
    assert summary["tokens_per_second"] == pytest.approx(48 / summary["seconds"])
    assert summary["tokens_per_round"] == 7 / 4
    assert len(summary["between_tokens_ms"]) == len(summary["time_to_first_token_ms"]) == 3
    assert summary["passes"] is None  # whose teacher it is nobody told
    assert "equal to teacher-only" in result.output


def test_reference_answers_of_an_earlier_run_are_not_asked_again(prompts: Path, tmp_path: Path) -> None:
    flags = ("--max-tokens", "4", "--concurrency", "2")
    bench(ScriptedOrchestrator(), prompts, tmp_path / "first", *flags)
    orchestrator = ScriptedOrchestrator()
    reference = ("--reference", str(tmp_path / "first"))
    result = bench(orchestrator, prompts, tmp_path / "second", *flags, *reference, "--limit", "3")
    assert result.exit_code == 0, result.output
    assert [options.drafter for options in orchestrator.requests] == ["ngram"] * 3
    # What was taken serves again.
    reference = ("--reference", str(tmp_path / "second"))
    result = bench(orchestrator, prompts, tmp_path / "third", *flags, *reference)
    assert result.exit_code == 2
    assert "no answer to the first turn of 'item-1'" in result.output
    other = bench(ScriptedOrchestrator(dtype="bfloat16"), prompts, tmp_path / "fourth", *flags, *reference)
    assert other.exit_code == 2
    assert "dtype: expected 'bfloat16'" in other.output
    longer = bench(orchestrator, prompts, tmp_path / "fifth", *flags, *reference, "--max-tokens", "5")
    assert "max_tokens: expected 5" in longer.output


def test_different_ids_end_the_run_with_status_1_and_are_listed(prompts: Path, tmp_path: Path) -> None:
    orchestrator = ScriptedOrchestrator(answer=leaving_at(3, text="4"), margin=0.0)
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "4", "--concurrency", "3")
    assert result.exit_code == 1
    assert "item-4 turn 1: token 3 is 999" in result.output
    lines, summary = files(tmp_path / "out")
    assert summary["exact_match"] == pytest.approx(5 / 6)
    assert summary["partial_match"] == pytest.approx((5 + 0.75) / 6)
    assert [(line["exact"], line["partial"]) for line in lines if line["id"] == "item-4"] == [(False, 0.75)]
    (first,) = summary["first_divergences"]
    assert (first["id"], first["position"], first["token"]) == ("item-4", 3, 999)
    assert (first["margin"], first["other_margin"]) == (0, 0)


@pytest.mark.parametrize(("margin", "status"), [(0.125, 0), (1.0, 1)])
def test_free_bfloat16_fails_only_beyond_a_near_tie(prompts: Path, tmp_path: Path, margin: float, status: int) -> None:
    orchestrator = ScriptedOrchestrator(dtype="bfloat16", answer=leaving_at(1), margin=margin)
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "4", "--concurrency", "2")
    assert result.exit_code == status, result.output
    _, summary = files(tmp_path / "out")
    assert [divergence["near_tie"] for divergence in summary["first_divergences"]] == [status == 0] * 6


def test_a_lost_draft_fails_the_run(prompts: Path, tmp_path: Path) -> None:
    orchestrator = ScriptedOrchestrator(fallback_reason="deadline")
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "4", "--concurrency", "2")
    assert result.exit_code == 1
    assert "rounds had no draft: deadline" in result.output


def test_a_refused_request_ends_the_run_with_status_2(prompts: Path, tmp_path: Path) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "last", "source": "test", "turns": ["refuse"]}) + "\n")
    result = bench(ScriptedOrchestrator(), prompts, tmp_path / "out", "--max-tokens", "2", "--concurrency", "2")
    assert result.exit_code == 2
    assert "reference-last: INVALID_ARGUMENT: options.chat: too long" in result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reference", "somewhere"], "expected a concurrency, an arrival rate, or both"),
        (["--arrival-rate", "0"], "arrival_rate"),
        (["--concurrency", "2", "--batching", "ragged"], "batching"),
        (["--concurrency", "2", "--against-transformers"], "against_transformers"),
        (["--concurrency", "2", "--soak", "1"], "soak: expected"),
        (["--concurrency", "2", "--reference", "missing"], "missing/reference.jsonl"),
    ],
)
def test_a_bad_combination_ends_with_status_2_and_names_it(
    prompts: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    orchestrator = ScriptedOrchestrator()
    result = bench(orchestrator, prompts, tmp_path / "out", *flags)
    assert result.exit_code == 2
    assert message in result.output
    assert orchestrator.requests == []


class FakeWatch:
    """The states of a teacher, one a look."""

    def __init__(self, *passes: Passes) -> None:
        self._passes = list(passes)

    async def state(self) -> TeacherState:
        return TeacherState("ragged", self._passes.pop(0), Free(1, 1), Free(1, 1))


async def phase_of(orchestrator: ScriptedOrchestrator, *requests: Request, watch: Any = None) -> LoadedPhase:
    with serving(orchestrator) as target:
        async with grpc.aio.insecure_channel(target) as channel:
            asker = Asker(channel, RequestLimits(max_tokens=9, rows=2, depth=2))
            try:
                return await loaded(asker, watch, requests, Load(2))
            finally:
                orchestrator.left.set()


def request(*token_ids: int, max_tokens: int = 3, **fields: Any) -> Request:
    reference = Answer(token_ids, "text", "stop", 1.0, 5, margins=(1.0,) * len(token_ids))
    return Request(PromptItem("a", "test", ("hello",)), reference, "ngram", "id", max_tokens, **fields)


def one_to(count: int) -> ScriptedOrchestrator:
    return ScriptedOrchestrator(answer=lambda options: list(range(1, 1 + min(count, options.max_tokens))))


async def test_a_shorter_request_is_compared_with_the_beginning_of_its_reference() -> None:
    phase = await phase_of(one_to(5), request(1, 2, 3, 4, 5), request(1, 2, 9, 4, 5))
    assert [record.turn.exact for record in phase.records] == [True, False]


async def test_a_caller_that_leaves_has_a_beginning_of_the_reference_or_is_not_exact() -> None:
    orchestrator = one_to(5)
    orchestrator.silent_after = 2
    leaving = {"max_tokens": 5, "cancel_after": 0.3}
    phase = await phase_of(orchestrator, request(1, 2, 3, 4, 5, **leaving), request(1, 2, 9, 4, 5, **leaving))
    assert [record.cancelled for record in phase.records] == [True, True]
    assert [record.streamed.answer.token_ids for record in phase.records] == [(1, 2, 3)] * 2
    assert [record.turn.exact for record in phase.records] == [True, False]


async def test_a_caller_may_leave_before_the_first_token() -> None:
    orchestrator = one_to(5)
    orchestrator.silent_after = 0
    phase = await phase_of(orchestrator, request(1, 2, 3, cancel_after=0.05))
    (record,) = phase.records
    assert (record.cancelled, record.streamed.arrivals, record.turn.exact) == (True, (), True)
    assert record.line()["partial"] is None


async def test_times_count_from_the_end_of_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_time(seconds: float) -> None: ...

    monkeypatch.setattr(asyncio, "sleep", no_time)
    (record,) = (await phase_of(one_to(3), request(1, 2, 3, pause=1000.0))).records
    assert record.streamed.answer.seconds == pytest.approx(-1000, abs=100)  # none of the pause has passed
    assert record.streamed.arrivals[0].seconds == pytest.approx(-1000, abs=100)


async def test_the_passes_of_a_phase_are_those_between_its_begin_and_its_end() -> None:
    before, after = Passes(10, 12, 40, 50, 1000, 100, 77), Passes(14, 20, 60, 90, 3000, 400, 99)
    phase = await phase_of(one_to(3), request(1, 2, 3), watch=FakeWatch(before, after))
    assert phase.batching == "ragged"
    assert phase.passes == Passes(4, 8, 20, 40, 2000, 300, 99)


async def test_an_answer_without_a_token_is_an_error_and_not_a_match() -> None:
    with serving(ScriptedOrchestrator(answer=lambda options: [])) as target:
        async with grpc.aio.insecure_channel(target) as channel:
            asker = Asker(channel, RequestLimits(max_tokens=9, rows=2, depth=2))
            with pytest.raises(AskError, match="holds no token"):
                await asker.ask_streamed([Message("user", "x")], "ngram", "id", arrived=0.0)


def test_a_load_raises_the_limits_that_it_would_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PANGU_DRAFT__SLOTS", "200")
    services = LoadSettings(tmp_path, concurrency=100).services()
    assert (services.teacher.slots, services.draft.slots) == (100, 200)
    assert (services.teacher.queue_limit, services.orchestrator.max_concurrent) == (100, 100)
    assert services.teacher.prefix_cache_tokens == 0
    small = LoadSettings(tmp_path, concurrency=2).services()
    assert (small.teacher.slots, small.orchestrator.max_concurrent) == (8, 64)
    unbounded = LoadSettings(tmp_path, arrival_rate=5.0, limit=30).services()
    assert (unbounded.teacher.slots, unbounded.teacher.queue_limit) == (8, 64)
    # Nobody is turned away for having waited, by the teacher or by the orchestrator.
    assert unbounded.teacher.queue_seconds >= 3600
    assert unbounded.orchestrator.teacher_deadline_seconds >= unbounded.teacher.queue_seconds


@pytest.mark.parametrize(
    "fields", [{}, {"concurrency": 2, "server": "127.0.0.1:1"}, {"concurrency": 2, "arrival_rate": 1.0}]
)
def test_a_soak_run_has_launched_services_and_a_closed_loop(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"soak|load"):
        SoakSettings(tmp_path, **fields)
    with pytest.raises(ValueError, match="soak_seconds: expected"):
        SoakSettings(tmp_path, concurrency=2, soak_seconds=0)
