"""The figures of summary.json from turn records made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from eagle_pangu.evaluation.records import Answer, Numerics, Timings, TurnRecord, near_tie_margin
from eagle_pangu.evaluation.summary import summarise

FLOAT32 = Numerics("float32", "free", "performance")
BITWISE = Numerics("bfloat16", "bitwise", "performance")
FREE = Numerics("bfloat16", "free", "performance")


def answer(*token_ids: int, seconds: float = 1.0, **fields: Any) -> Answer:
    plain = Answer(token_ids, "text", "length", seconds, prompt_tokens=3, margins=(1.0,) * len(token_ids))
    return dataclasses.replace(plain, **fields)


def turn(alone: Answer, other: Answer | None = None, *, oracle: Answer | None = None, number: int = 1) -> TurnRecord:
    return TurnRecord("item", number, alone, other, oracle)


def test_rates_are_totals_over_totals_and_speedups_one_vote_a_turn() -> None:
    records = [
        turn(
            answer(1, 2, 3, 4, 5, seconds=4, rounds=4),
            answer(1, 2, 3, 4, 5, seconds=1, rounds=2, drafted=8, accepted=2, drafter="ngram"),
        ),
        turn(
            answer(1, 2, 3, seconds=2, rounds=2),
            answer(1, 2, 3, seconds=4, rounds=2, drafted=8, accepted=0, drafter="ngram"),
        ),
    ]
    summary = summarise(records, FLOAT32)
    assert summary.turns == 2
    assert summary.drafter == "ngram"
    assert summary.exact_match == 1
    assert summary.first_divergences == ()
    assert summary.tokens_per_round == 6 / 4
    assert summary.accepted_length_mean == 2 / 4
    assert summary.tokens_per_second == 8 / 5
    assert summary.teacher_only_tokens_per_second == 8 / 6
    assert summary.speedup_mean == pytest.approx((4 + 0.5) / 2)
    assert summary.share_below_1 == 0.5
    assert summary.failures == ()


def test_speedup_percentiles_interpolate_between_turns() -> None:
    records = [turn(answer(1, seconds=speedup), answer(1, seconds=1)) for speedup in range(1, 102)]
    summary = summarise(records, FLOAT32)
    assert summary.speedup_p1 == pytest.approx(2)
    assert summary.speedup_p50 == pytest.approx(51)
    assert summary.speedup_p99 == pytest.approx(100)


def test_round_time_is_split_by_part_and_the_rest_is_outside_the_models() -> None:
    timings = Timings(
        draft_us=4000,
        wire_us=1000,
        queue_us=200,
        teacher_us=12_000,
        commit_us=400,
        orchestrator_us=400,
        rounds_us=18_000,
        prefill_us=50_000,
    )
    quick = Timings(draft_us=1000, teacher_us=1000, rounds_us=2100)
    records = [
        turn(answer(1, 2, rounds=1), answer(1, 2, rounds=2, timings=timings)),
        turn(answer(1, 2, rounds=1), answer(1, 2, rounds=1, timings=quick)),
    ]
    summary = summarise(records, FLOAT32)
    assert summary.round_ms == pytest.approx(
        {
            "draft": 5 / 3,
            "wire": 1 / 3,
            "queue": 0.2 / 3,
            "teacher": 13 / 3,
            "commit": 0.4 / 3,
            "orchestrator": 0.4 / 3,
            "total": 20.1 / 3,
        }
    )
    assert summary.outside_models_ms_p50 == pytest.approx(1.0)  # two rounds of 1.0 ms, one of 0.1 ms
    assert summary.outside_models_source == "turns"
    traced = summarise(records, FLOAT32, outside_models_ms=[3, 1, 2])
    assert traced.outside_models_ms_p50 == 2
    assert traced.outside_models_source == "trace"


def test_speedup_without_prefill_compares_the_rounds_alone() -> None:
    alone = answer(1, 2, 3, rounds=2, timings=Timings(rounds_us=2000))
    other = answer(1, 2, 3, rounds=1, timings=Timings(rounds_us=500))
    assert turn(alone, other).decode_speedup == 4
    assert turn(answer(1), answer(1)).decode_speedup is None


def test_teacher_only_alone_has_no_speedup_and_no_verdict() -> None:
    summary = summarise([turn(answer(1, 2, rounds=1))], FLOAT32)
    assert summary.drafter == "none"
    assert summary.exact_match is None
    assert summary.speedup_mean is None
    assert summary.tokens_per_second == summary.teacher_only_tokens_per_second == 2


@pytest.mark.parametrize("numerics", [FLOAT32, BITWISE])
def test_any_divergence_fails_where_ids_must_be_equal(numerics: Numerics) -> None:
    alone = answer(1, 2, 3, margins=(1.0, 0.0, 1.0))
    summary = summarise([turn(alone, answer(1, 9, 3, margins=(1.0, 0.0, 1.0)), number=2)], numerics)
    assert summary.exact_match == 0
    (divergence,) = summary.first_divergences
    assert (divergence.id, divergence.turn, divergence.position) == ("item", 2, 1)
    assert (divergence.teacher_only_token, divergence.token, divergence.margin) == (2, 9, 0.0)
    assert divergence.near_tie
    assert len(summary.failures) == 1
    assert "token 1 is 9, teacher-only 2" in summary.failures[0]


@pytest.mark.parametrize(
    ("margin", "other_margin", "near_tie"),
    [(0.375, 0.125, True), (0.125, 0.375, True), (0.5, 0.0, False), (0.0, 0.5, False)],
)
def test_free_bfloat16_forgives_a_divergence_only_at_a_near_tie_on_both_sides(
    margin: float, other_margin: float, near_tie: bool
) -> None:
    record = turn(answer(1, 2, margins=(5.0, margin)), answer(1, 9, margins=(5.0, other_margin)))
    summary = summarise([record, turn(answer(1), answer(1))], FREE)
    assert summary.exact_match == 0.5
    assert summary.first_divergences[0].near_tie is near_tie
    assert bool(summary.failures) is not near_tie


def test_an_answer_that_ends_elsewhere_is_a_divergence_and_never_a_near_tie() -> None:
    records = [
        turn(answer(1, 2), answer(1, 2, 3)),
        turn(answer(1, 2), answer(1, 2, finish_reason="stop")),
        turn(answer(1, 2, margins=()), answer(1, 9, margins=())),
    ]
    summary = summarise(records, FREE)
    assert [divergence.position for divergence in summary.first_divergences] == [2, 2, 1]
    assert [divergence.token for divergence in summary.first_divergences] == [3, None, 9]
    assert not any(divergence.near_tie for divergence in summary.first_divergences)
    assert len(summary.failures) == 3


def test_a_near_tie_is_two_ulps_of_the_dtype() -> None:
    assert near_tie_margin("bfloat16") == 0.375
    assert near_tie_margin("float16") == 3 * 2.0**-6
    assert near_tie_margin("float32") == 3 * 2.0**-19


def test_transformers_is_an_oracle_in_float32_and_a_yardstick_elsewhere() -> None:
    records = [turn(answer(1, 2, seconds=1), answer(1, 2), oracle=answer(1, 7, seconds=2))]
    exact, free = summarise(records, FLOAT32), summarise(records, BITWISE)
    assert exact.transformers_exact_match == 0
    assert exact.teacher_only_over_transformers == 2
    assert exact.transformers_tokens_per_second == 1
    assert "transformers' generate" in exact.failures[0]
    assert free.transformers_exact_match == 0
    assert free.failures == ()


def test_prompt_lookup_is_timed_against_teacher_only_and_compared_with_its_own_greedy() -> None:
    def record(seconds: float, *token_ids: int) -> TurnRecord:
        alone, oracle = answer(1, 2, seconds=4), answer(1, 3, seconds=5)
        return TurnRecord("item", 1, alone, alone, oracle, answer(*token_ids, seconds=seconds))

    summary = summarise([record(2, 1, 3), record(8, 1, 4)], BITWISE)
    assert summary.prompt_lookup_exact_match == 0.5
    assert summary.prompt_lookup_speedup_mean == (2 + 0.5) / 2
    assert summary.prompt_lookup_speedup_p50 == 1.25
    assert summary.failures == ()
    assert summarise([turn(answer(1, 2))], BITWISE).prompt_lookup_speedup_mean is None


def test_a_prompt_that_transformers_reads_otherwise_fails_the_run() -> None:
    oracle = answer(1, 2, prompt_tokens=4)
    summary = summarise([turn(answer(1, 2), oracle=oracle)], BITWISE)
    assert "prompt of 3 tokens" in summary.failures[0]


@pytest.mark.parametrize(("fallbacks", "fails"), [(2, False), (3, True)])
def test_a_run_mostly_without_its_draft_proves_nothing(fallbacks: int, fails: bool) -> None:
    lost = answer(1, rounds=20, fallback_rounds=fallbacks, fallback_reasons=("deadline",))
    failures = summarise([turn(answer(1), lost)], FLOAT32).failures
    expected = f"{fallbacks} of 20 rounds had no draft (deadline): neither ids nor speed tell much of it"
    assert failures == ((expected,) if fails else ())


def test_fallbacks_of_all_turns_are_counted_and_named_once() -> None:
    lost = answer(1, fallback_rounds=2, fallback_reasons=("unavailable", "deadline"))
    again = answer(1, fallback_rounds=1, fallback_reasons=("deadline",))
    summary = summarise([turn(answer(1), lost), turn(answer(1), again)], FLOAT32)
    assert summary.fallback_rounds == 3
    assert summary.fallback_reasons == ("deadline", "unavailable")
