"""`eagle-pangu bench` from flags to files, over a real gRPC server whose answers are scripted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from eagle_pangu.cli.bench import bench as bench_command
from protos.v1 import generation_pb2
from tests.evaluation.scripted_orchestrator import ScriptedOrchestrator, serving, usual_answer
from tests.models import tiny_llama

app = typer.Typer()
app.command()(bench_command)

TURN_FIELDS = {"id", "turn", "token_ids", "finish_reason", "rounds", "tokens_per_round", "speedup", "exact"}
SUMMARY_FIELDS = {
    "turns",
    "exact_match",
    "first_divergences",
    "tokens_per_round",
    "accepted_length_mean",
    "speedup_mean",
    "speedup_p50",
    "speedup_p99",
    "speedup_p1",
    "share_below_1",
    "tokens_per_second",
    "teacher_only_tokens_per_second",
    "round_ms",
    "outside_models_ms_p50",
    "settings",
    "numerics",
    "versions",
    "cpu",
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    items = [
        {"id": "one", "source": "test", "turns": ["First question.", "Second question."]},
        {"id": "two", "source": "test", "turns": ["Another question."]},
    ]
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def bench(orchestrator: ScriptedOrchestrator, prompts: Path, output: Path, *flags: str) -> Result:
    with serving(orchestrator) as target:
        arguments = ["--server", target, "--prompts", str(prompts), "--output", str(output), *flags]
        return CliRunner().invoke(app, arguments, catch_exceptions=False)


def files(output: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    turns = [json.loads(line) for line in (output / "turns.jsonl").read_text(encoding="utf-8").splitlines()]
    return turns, json.loads((output / "summary.json").read_text(encoding="utf-8"))


def leaving_at(position: int) -> Any:
    """Answers whose speculative ids differ from one position on."""

    def answer(options: generation_pb2.GenerationOptions) -> list[int]:
        ids = usual_answer(options)
        return ids if options.drafter == "none" else [*ids[:position], 999, *ids[position + 1 :]]

    return answer


def test_a_run_writes_a_line_a_turn_and_a_summary_with_every_field(prompts: Path, tmp_path: Path) -> None:
    orchestrator = ScriptedOrchestrator()
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "9", "--rows", "4", "--depth", "3")
    assert result.exit_code == 0, result.output
    turns, summary = files(tmp_path / "out")
    assert [(turn["id"], turn["turn"]) for turn in turns] == [("one", 1), ("one", 2), ("two", 1)]
    assert all(turn.keys() >= TURN_FIELDS for turn in turns)
    assert all(turn["exact"] and turn["finish_reason"] == "length" and len(turn["token_ids"]) == 9 for turn in turns)
    assert turns[0]["rounds"] == 4
    assert turns[0]["tokens_per_round"] == 2
    assert turns[0]["speedup"] == pytest.approx(turns[0]["teacher_only_seconds"] / turns[0]["seconds"])
    assert summary.keys() >= SUMMARY_FIELDS
    assert summary["turns"] == 3
    assert summary["exact_match"] == 1
    assert summary["tokens_per_round"] == 2
    assert summary["accepted_length_mean"] == 1
    assert summary["round_ms"]["teacher"] == 6
    assert summary["outside_models_ms_p50"] == 1
    assert summary["settings"]["max_tokens"] == 9
    assert summary["numerics"]["dtype"] == "float32"
    budgets = {(options.budget.rows, options.budget.depth) for options in orchestrator.requests}
    assert budgets == {(4, 3)}
    assert all(options.return_margins for options in orchestrator.requests)


def test_who_goes_first_alternates_and_a_second_turn_follows_the_teacher_only_answer(
    prompts: Path, tmp_path: Path
) -> None:
    orchestrator = ScriptedOrchestrator()
    bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "3", "--warmup", "0")
    assert [options.drafter for options in orchestrator.requests] == ["none", "ngram", "ngram", "none", "none", "ngram"]
    first, second = orchestrator.requests[0], orchestrator.requests[2]
    roles = [(message.role, message.content) for message in second.chat.messages]
    assert roles == [
        ("user", "First question."),
        ("assistant", f"answer of none: {usual_answer(first)}"),
        ("user", "Second question."),
    ]
    assert second.chat == orchestrator.requests[3].chat
    assert len({options.request_id for options in orchestrator.requests}) == 6


def test_warm_up_turns_are_asked_and_not_counted(prompts: Path, tmp_path: Path) -> None:
    orchestrator = ScriptedOrchestrator()
    bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "2", "--warmup", "2")
    assert len(orchestrator.requests) == 2 * (2 + 3)
    turns, _ = files(tmp_path / "out")
    assert len(turns) == 3


def test_different_ids_in_float32_end_the_run_with_status_1_and_are_listed(prompts: Path, tmp_path: Path) -> None:
    orchestrator = ScriptedOrchestrator(answer=leaving_at(2), margin=0.0)
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "4", "--limit", "1")
    assert result.exit_code == 1
    assert "one turn 1: token 2 is 999" in result.output
    turns, summary = files(tmp_path / "out")
    assert summary["exact_match"] == 0
    first = summary["first_divergences"][0]
    assert (first["id"], first["turn"], first["position"], first["token"]) == ("one", 1, 2, 999)
    assert first["teacher_only_token"] == turns[0]["teacher_only_token_ids"][2]
    assert first["margin"] == 0
    assert [turn["exact"] for turn in turns] == [False, False]


@pytest.mark.parametrize(("margin", "status"), [(0.125, 0), (1.0, 1)])
def test_free_bfloat16_ends_with_status_1_only_beyond_a_near_tie(
    prompts: Path, tmp_path: Path, margin: float, status: int
) -> None:
    orchestrator = ScriptedOrchestrator(dtype="bfloat16", answer=leaving_at(1), margin=margin)
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "4")
    assert result.exit_code == status, result.output
    _, summary = files(tmp_path / "out")
    assert [divergence["near_tie"] for divergence in summary["first_divergences"]] == [status == 0] * 3


def test_drafter_none_asks_each_turn_once(prompts: Path, tmp_path: Path) -> None:
    orchestrator = ScriptedOrchestrator()
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "4", "--drafter", "none", "--warmup", "0")
    assert result.exit_code == 0
    assert [options.drafter for options in orchestrator.requests] == ["none"] * 3
    turns, summary = files(tmp_path / "out")
    assert [turn["speedup"] for turn in turns] == [None] * 3
    assert [turn["rounds"] for turn in turns] == [3] * 3
    assert summary["exact_match"] is None
    assert summary["teacher_only_tokens_per_second"] > 0


def test_transformers_answers_every_turn_too_when_asked(prompts: Path, tmp_path: Path) -> None:
    model = str(tiny_llama(tmp_path / "model"))
    flags = ["--against-transformers", "--teacher-model", model, "--teacher-threads", "1", "--max-tokens", "3"]
    result = bench(ScriptedOrchestrator(), prompts, tmp_path / "out", *flags)
    assert result.exit_code == 1  # the script knows nothing of this model
    assert "in transformers' generate" in result.output
    turns, summary = files(tmp_path / "out")
    assert all(turn["exact"] and not turn["transformers_exact"] for turn in turns)
    assert all(1 <= len(turn["transformers_token_ids"]) <= 3 for turn in turns)
    assert summary["exact_match"] == 1
    assert summary["transformers_exact_match"] == 0
    rates = (summary["teacher_only_tokens_per_second"], summary["transformers_tokens_per_second"])
    assert summary["teacher_only_over_transformers"] == pytest.approx(rates[0] / rates[1])


def test_a_lost_draft_is_said_aloud(prompts: Path, tmp_path: Path) -> None:
    orchestrator = ScriptedOrchestrator(fallback_reason="unavailable")
    result = bench(orchestrator, prompts, tmp_path / "out", "--max-tokens", "4")
    assert result.exit_code == 1  # what it compared is teacher-only with itself, in part
    assert "rounds had no draft: unavailable" in result.output


def test_a_refused_turn_ends_the_run_with_its_status_and_keeps_the_turns_before(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    items = [{"id": str(n), "source": "test", "turns": [text]} for n, text in enumerate(["fine", "refuse"])]
    prompts.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    result = bench(ScriptedOrchestrator(), prompts, tmp_path / "out", "--max-tokens", "2")
    assert result.exit_code == 2
    assert "INVALID_ARGUMENT: options.chat: too long" in result.output
    assert len((tmp_path / "out" / "turns.jsonl").read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard", "3/2"], "shard"),
        (["--shard", "2/2", "--limit", "1"], "shard"),
        (["--dtype", "float32"], "dtype: the services behind a server have their own"),
        (["--draft-threads", "1"], "draft_threads: the services"),
        (["--teacher-threads", "1"], "teacher_threads: the services"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_a_bad_flag_ends_with_status_2_and_names_it(
    prompts: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    orchestrator = ScriptedOrchestrator()
    result = bench(orchestrator, prompts, tmp_path / "out", *flags)
    assert result.exit_code == 2
    assert message in result.output
    assert orchestrator.requests == []
