"""A whole run over three real processes and a tiny model: exact against teacher-only and against transformers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_pangu.evaluation.replay import replay
from eagle_pangu.evaluation.run import RunSettings, run
from eagle_pangu.evaluation.trace_file import read_trace
from eagle_pangu.serving.configuration import SettingsError
from tests.models import tiny_llama


@pytest.mark.slow
async def test_a_run_over_three_processes_is_exact_and_its_trace_replays(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "source": "test", "turns": ["abcabcabc", "again"]}) + "\n")
    settings = RunSettings(
        output=tmp_path / "out",
        prompts=prompts,
        max_tokens=24,
        dtype="float32",
        numerics="free",
        teacher_model=str(tiny_llama(tmp_path / "model")),
        teacher_threads=1,
        draft_threads=1,
        against_prompt_lookup=True,
        warmup=0,
    )
    states: list[tuple[str, str]] = []
    summary = await run(settings, on_state=lambda name, state: states.append((name, state)))
    assert summary.failures == ()
    assert (summary.exact_match, summary.transformers_exact_match, summary.fallback_rounds) == (1, 1, 0)
    assert summary.prompt_lookup_exact_match == 1
    assert summary.prompt_lookup_speedup_mean is not None
    assert (summary.drafter, summary.outside_models_source) == ("ngram", "trace")
    assert summary.outside_models_ms_p50 > 0
    assert summary.numerics.policy == "free"
    assert next(state for state in states if state[1] == "stopped") == ("orchestrator", "stopped")
    requests = read_trace(tmp_path / "out" / "trace.jsonl")
    assert len(requests) == 4
    assert [replay(request).faults for request in requests] == [()] * 4
    lines = [json.loads(line) for line in (tmp_path / "out" / "turns.jsonl").read_text().splitlines()]
    replayed = {request.request_id: list(replay(request).token_ids) for request in requests}
    assert all(replayed[line["request_id"]] == line["token_ids"] for line in lines)


def test_flags_lie_over_the_configuration_and_raise_the_limits_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PANGU_TEACHER__THREADS", "3")
    settings = RunSettings(tmp_path, drafter="standalone", rows=200, depth=2, dtype="float32", draft_model="somewhere")
    services = settings.services()
    assert services.teacher.threads == 3
    assert (services.teacher.dtype, services.draft.dtype) == ("float32", "float32")
    assert (services.draft.drafter, services.draft.model) == ("standalone", "somewhere")
    assert (services.orchestrator.rows, services.orchestrator.depth) == (200, 2)
    assert services.teacher.max_rows == services.draft.max_rows == 200
    assert services.teacher.max_depth == dataclasses.replace(settings, depth=None).services().teacher.max_depth
    assert services.orchestrator.trace == (tmp_path / "trace.jsonl").resolve()


def test_a_value_that_the_services_do_not_take_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"teacher\.dtype"):
        RunSettings(tmp_path, dtype="float8").services()


def test_transformers_own_generate_takes_its_model_and_threads_beside_a_server(tmp_path: Path) -> None:
    RunSettings(tmp_path, server="host:1", against_transformers=True, teacher_model="somewhere", teacher_threads=1)
    with pytest.raises(ValueError, match="numerics: the services"):
        RunSettings(tmp_path, server="host:1", against_transformers=True, numerics="free")


def test_the_benchmark_and_the_trace_commands_import_without_torch() -> None:
    code = (
        "import sys; import eagle_pangu.cli.ablate, eagle_pangu.cli.bench, eagle_pangu.cli.bench_numerics;"
        "import eagle_pangu.cli.trace;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
