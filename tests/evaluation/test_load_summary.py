"""The figures of a load from records made by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from rich.console import Console

from eagle_pangu.evaluation.arrivals import Load
from eagle_pangu.evaluation.latency import Arrival, StreamedAnswer
from eagle_pangu.evaluation.load import LoadedPhase, LoadRecord
from eagle_pangu.evaluation.load_summary import TimeShares, summarise_load
from eagle_pangu.evaluation.records import Answer, Numerics, Timings, TurnRecord
from eagle_pangu.evaluation.tables import load_table
from eagle_pangu.evaluation.teacher_state import Passes

FLOAT32 = Numerics("float32", "free", "performance")
FREE = Numerics("bfloat16", "free", "performance")
TIMINGS = Timings(
    draft_us=10,
    wire_us=5,
    queue_us=15,
    teacher_us=40,
    commit_us=4,
    orchestrator_us=6,
    rounds_us=80,
    prefill_us=20,
)


def record(reference: tuple[int, ...], answer: tuple[int, ...], *, margin: float = 1.0, **fields: Any) -> LoadRecord:
    alone = Answer(reference, "", "length", 1.0, 3, margins=(margin,) * len(reference))
    other = dataclasses.replace(alone, token_ids=answer, margins=(margin,) * len(answer), seconds=3.0, **fields)
    arrivals = (Arrival(1.0, 1), Arrival(3.0, len(answer) - 1)) if len(answer) > 1 else (Arrival(2.0, 1),)
    return LoadRecord(TurnRecord("a", 1, alone, other), StreamedAnswer(other, arrivals))


def phase(*records: LoadRecord, **fields: Any) -> LoadedPhase:
    return LoadedPhase(Load(2, 3.0), records, seconds=2.0, **fields)


def test_rates_matches_and_waits_are_over_all_requests() -> None:
    summary = summarise_load(
        phase(
            record((1, 2, 3, 4), (1, 2, 3, 4), rounds=2, load_limited_rounds=1, timings=TIMINGS),
            record((1, 2, 3, 4), (1, 9, 3, 4), rounds=1),
            record((1,), (1,)),
        ),
        FLOAT32,
        "hybrid",
    )
    assert (summary.requests, summary.concurrency, summary.arrival_rate, summary.drafter) == (3, 2, 3.0, "hybrid")
    assert (summary.tokens, summary.tokens_per_second) == (9, 4.5)
    assert summary.exact_match == pytest.approx(2 / 3)
    assert summary.partial_match == pytest.approx((1 + 0.25 + 1) / 3)
    assert summary.tokens_per_round == 6 / 3
    assert summary.load_limited_share == pytest.approx(1 / 3)
    assert summary.time_to_first_token_ms is not None
    assert summary.time_to_first_token_ms.p50 == 1000
    assert summary.between_tokens_ms == pytest.approx((2000 / 3,) * 3)
    assert summary.longest_wait_ms == 2000
    assert [failure[:24] for failure in summary.failures] == ["a turn 1: token 1 is 9, "]
    json.dumps(summary.to_json())


def test_the_passes_of_the_phase_give_sessions_rows_and_the_share_of_realignment() -> None:
    passes = Passes(
        passes=4, sessions=10, rows=40, computed_rows=60, pass_us=1_000_000, realign_us=250_000, longest_wait_us=7000
    )
    summary = summarise_load(phase(record((1,), (1,)), batching="eqspec", passes=passes), FLOAT32, "none")
    figures = summary.passes
    assert figures is not None
    assert (figures.batching, figures.passes, figures.sessions_per_pass, figures.rows_per_pass) == (
        "eqspec",
        4,
        2.5,
        10,
    )
    assert (figures.computed_over_rows, figures.pass_ms) == (1.5, 250)
    assert (figures.realignment_share, figures.busy_share, figures.longest_wait_ms) == (0.25, 0.5, 7)


def test_time_shares_come_to_one_and_realignment_is_a_part_of_the_passes() -> None:
    passes = Passes(1, 1, 1, 1, pass_us=100, realign_us=25, longest_wait_us=0)
    answered = record((1, 2), (1, 2), rounds=1, timings=TIMINGS)
    shares = summarise_load(phase(answered, passes=passes), FLOAT32, "ngram").time_shares
    expected = TimeShares(prefill=0.2, draft=0.1, wire_and_queue=0.2, teacher=0.4, realignment=0.1, rest=0.1)
    assert shares is not None
    assert dataclasses.astuple(shares) == pytest.approx(dataclasses.astuple(expected))


def test_only_near_ties_may_differ_where_numerics_are_free_and_rounds_must_have_had_their_draft() -> None:
    tie, apart = (record((1, 2), (1, 9), margin=margin) for margin in (0.1, 5.0))
    assert summarise_load(phase(tie), FREE, "ngram").failures == ()
    assert len(summarise_load(phase(apart), FREE, "ngram").failures) == 1
    assert len(summarise_load(phase(tie), FREE, "ngram", near_tie=0.05).failures) == 1
    lost = record((1, 2), (1, 2), rounds=1, fallback_rounds=1, fallback_reasons=("deadline",))
    (failure,) = summarise_load(phase(lost), FREE, "ngram").failures
    assert "deadline" in failure


def test_what_is_not_known_is_none_and_left_out_of_the_table() -> None:
    summary = summarise_load(phase(record((1,), (1,))), FLOAT32, "none")
    assert (summary.passes, summary.time_shares, summary.between_tokens_ms) == (None, None, None)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(load_table(summary))
    assert "tokens/s" in shown.get()
    assert "pass" not in shown.get()


def test_no_request_is_no_summary() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarise_load(phase(), FLOAT32, "none")
