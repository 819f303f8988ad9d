"""Whole load runs over three real processes and a tiny model: exact, with the teacher's own counters beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_pangu.evaluation.load_run import LoadSettings, run_load
from eagle_pangu.evaluation.soak_run import SoakSettings, run_soak
from tests.models import tiny_llama


def common(tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    items = [{"id": f"p{n}", "source": "test", "turns": [f"abcabcabc {n} " * (n + 1)]} for n in range(6)]
    prompts.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return {
        "output": tmp_path / "out",
        "prompts": prompts,
        "max_tokens": 16,
        "dtype": "float32",
        "numerics": "free",
        "teacher_model": str(tiny_llama(tmp_path / "model")),
        "teacher_threads": 1,
        "draft_threads": 1,
        "warmup": 0,
    }


@pytest.mark.slow
async def test_a_load_is_exact_and_the_summary_knows_the_passes_of_the_load_alone(tmp_path: Path) -> None:
    summary = await run_load(LoadSettings(**common(tmp_path), concurrency=3, batching="ragged"))
    assert summary.failures == ()
    assert (summary.requests, summary.exact_match, summary.fallback_rounds) == (6, 1, 0)
    assert summary.passes is not None
    assert summary.passes.batching == "ragged"
    assert summary.passes.realignment_share == 0
    # A round needs a pass, a prompt one or a few; those of the references would be 6 * 16 more.
    sessions = round(summary.passes.sessions_per_pass * summary.passes.passes)
    assert summary.rounds + 6 <= sessions <= summary.rounds + 6 * 3
    assert summary.time_shares is not None
    assert summary.time_shares.teacher > 0


@pytest.mark.slow
async def test_an_endurance_run_is_exact_and_everything_is_given_back(tmp_path: Path) -> None:
    settings = SoakSettings(**common(tmp_path), concurrency=6, soak_seconds=4, longest_prompt=200, seed=137)
    # Of the first sessions of this seed three leave within 4 ms, sooner than anything can answer.
    summary = await run_soak(settings)
    assert summary.failures == ()
    assert summary.load.exact_match == 1
    assert summary.finished > 0
    assert summary.cancelled > 0
    assert summary.free_before == summary.free_after
    assert summary.free_before.slots == 8
    lines = (tmp_path / "out" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == summary.finished + summary.cancelled
