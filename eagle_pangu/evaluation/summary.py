"""From turn records to the figures of summary.json, and to the verdict whether the run held what it must.

Pure: records in, numbers out. Rates are totals over totals, so long turns count by their length; speed-up figures are
over turns, one turn one vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from eagle_pangu.evaluation.exactness import divergences_of, not_exact, without_draft
from eagle_pangu.evaluation.records import (
    Answer,
    Divergence,
    Numerics,
    TurnRecord,
    near_tie_margin,
    same,
)

PARTS = ("draft", "wire", "queue", "teacher", "commit", "orchestrator")


@dataclass(frozen=True)
class Summary:
    """The figures of a run. Milliseconds and seconds say so in their name; a figure that does not apply is None.

    exact_match: share of turns, 0 .. 1, whose speculative answer is the teacher-only one; None with drafter "none".
    tokens_per_round: answer tokens after the first of each turn / rounds. accepted_length_mean: accepted rows / rounds.
    speedup_*: over turns, teacher-only time / time of whole requests; decode_speedup_*: the same without prefill.
    share_below_1: share of turns slower than teacher-only. round_ms: mean milliseconds of a round by part.
    outside_models_ms_p50: median over rounds of the time outside the two models' compute; from the trace round by round
    where there is one, else from each turn's mean, weighted by its rounds (outside_models_source says which).
    teacher_only_over_transformers: tokens/s of teacher-only / tokens/s of transformers' generate.
    prompt_lookup_*: of transformers' own prompt lookup: speed-ups as above, over the same teacher-only answers;
    exact_match is the share of its answers with the ids of transformers' plain greedy generate.
    failures: what did not hold; empty when the run passed.
    """

    turns: int
    drafter: str
    exact_match: float | None
    first_divergences: tuple[Divergence, ...]
    tokens_per_round: float
    accepted_length_mean: float
    speedup_mean: float | None
    speedup_p50: float | None
    speedup_p99: float | None
    speedup_p1: float | None
    share_below_1: float | None
    decode_speedup_mean: float | None
    decode_speedup_p50: float | None
    tokens: int
    tokens_per_second: float
    teacher_only_tokens_per_second: float
    rounds: int
    round_ms: dict[str, float]
    teacher_only_round_ms: dict[str, float]
    outside_models_ms_p50: float
    outside_models_source: str
    fallback_rounds: int
    fallback_reasons: tuple[str, ...]
    transformers_exact_match: float | None
    transformers_first_divergences: tuple[Divergence, ...]
    transformers_tokens_per_second: float | None
    teacher_only_over_transformers: float | None
    prompt_lookup_exact_match: float | None
    prompt_lookup_speedup_mean: float | None
    prompt_lookup_speedup_p50: float | None
    prompt_lookup_speedup_p99: float | None
    prompt_lookup_speedup_p1: float | None
    numerics: Numerics
    near_tie_margin: float
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The object of summary.json, without what the runner adds (settings, versions, machine)."""
        return asdict(self)


def summarise(
    records: Sequence[TurnRecord],
    numerics: Numerics,
    *,
    near_tie: float | None = None,
    outside_models_ms: Sequence[float] = (),
) -> Summary:
    """The figures of at least one turn.

    Args:
        records: the turns, all answered in the same ways.
        numerics: the teacher's own.
        near_tie: largest margin of a near-tie in logits; None: `near_tie_margin` of the teacher's dtype.
        outside_models_ms: of every speculative round, from a trace; may be empty.

    Raises:
        ValueError: no record.
    """
    if not records:
        raise ValueError("no turn to sum up")
    tie = near_tie_margin(numerics.dtype) if near_tie is None else near_tie
    answers = [record.answer for record in records]
    alone = [record.teacher_only for record in records]
    oracle = [record.transformers for record in records if record.transformers is not None]
    speedups = [record.speedup for record in records if record.speedup is not None]
    decode_speedups = [record.decode_speedup for record in records if record.decode_speedup is not None]
    lookup_speedups = [record.prompt_lookup_speedup for record in records if record.prompt_lookup_speedup is not None]
    lookup_exact = [
        same(record.transformers, record.prompt_lookup)
        for record in records
        if record.transformers is not None and record.prompt_lookup is not None
    ]
    exact = [record.exact for record in records if record.exact is not None]
    oracle_exact = [record.transformers_exact for record in records if record.transformers_exact is not None]
    divergences = divergences_of(records, [record.speculative for record in records], tie)
    oracle_divergences = divergences_of(records, [record.transformers for record in records], tie)
    rounds = sum(answer.rounds for answer in answers)
    oracle_rate = _tokens_per_second(oracle) if oracle else None
    alone_rate = _tokens_per_second(alone)
    return Summary(
        turns=len(records),
        drafter=answers[0].drafter,
        exact_match=_mean(exact),
        first_divergences=divergences,
        tokens_per_round=_over(sum(len(answer.token_ids) - 1 for answer in answers if answer.rounds), rounds),
        accepted_length_mean=_over(sum(answer.accepted for answer in answers), rounds),
        speedup_mean=_mean(speedups),
        speedup_p50=_percentile(speedups, 50),
        speedup_p99=_percentile(speedups, 99),
        speedup_p1=_percentile(speedups, 1),
        share_below_1=_mean([speedup < 1 for speedup in speedups]),
        decode_speedup_mean=_mean(decode_speedups),
        decode_speedup_p50=_percentile(decode_speedups, 50),
        tokens=sum(len(answer.token_ids) for answer in answers),
        tokens_per_second=_tokens_per_second(answers),
        teacher_only_tokens_per_second=alone_rate,
        rounds=rounds,
        round_ms=_round_ms(answers),
        teacher_only_round_ms=_round_ms(alone),
        outside_models_ms_p50=float(np.median(outside_models_ms)) if outside_models_ms else _outside_by_turn(answers),
        outside_models_source="trace" if outside_models_ms else "turns",
        fallback_rounds=sum(answer.fallback_rounds for answer in answers),
        fallback_reasons=tuple(sorted({reason for answer in answers for reason in answer.fallback_reasons})),
        transformers_exact_match=_mean(oracle_exact),
        transformers_first_divergences=oracle_divergences,
        transformers_tokens_per_second=oracle_rate,
        teacher_only_over_transformers=None if oracle_rate is None else alone_rate / oracle_rate,
        prompt_lookup_exact_match=_mean(lookup_exact),
        prompt_lookup_speedup_mean=_mean(lookup_speedups),
        prompt_lookup_speedup_p50=_percentile(lookup_speedups, 50),
        prompt_lookup_speedup_p99=_percentile(lookup_speedups, 99),
        prompt_lookup_speedup_p1=_percentile(lookup_speedups, 1),
        numerics=numerics,
        near_tie_margin=tie,
        failures=tuple(_failures(records, numerics, divergences, oracle_divergences)),
    )


def _failures(
    records: Sequence[TurnRecord],
    numerics: Numerics,
    divergences: Sequence[Divergence],
    oracle_divergences: Sequence[Divergence],
) -> list[str]:
    """Exactness (DESIGN §7), a draft that was there to be exact with, and in float32, where it is one, the oracle."""
    failures = [*not_exact(divergences, numerics), *without_draft([record.answer for record in records])]
    if numerics.dtype == "float32":
        failures += [
            f"{d.id} turn {d.turn}: token {d.position} is {d.token} in transformers' generate,"
            f" teacher-only {d.teacher_only_token} (margin {d.margin})"
            for d in oracle_divergences
        ]
    failures += [
        f"{record.id} turn {record.turn}: prompt of {record.teacher_only.prompt_tokens} tokens,"
        f" by transformers' chat template {record.transformers.prompt_tokens}"
        for record in records
        if record.transformers and record.transformers.prompt_tokens != record.teacher_only.prompt_tokens
    ]
    return failures


def _round_ms(answers: Sequence[Answer]) -> dict[str, float]:
    rounds = sum(answer.rounds for answer in answers)
    totals = {part: sum(getattr(answer.timings, f"{part}_us") for answer in answers) for part in (*PARTS, "rounds")}
    mean = {part: _over(total, 1000 * rounds) for part, total in totals.items()}
    return {**{part: mean[part] for part in PARTS}, "total": mean["rounds"]}


def _outside_by_turn(answers: Sequence[Answer]) -> float:
    with_rounds = [answer for answer in answers if answer.rounds]
    if not with_rounds:
        return 0.0
    means = [answer.timings.outside_models_us / answer.rounds / 1000 for answer in with_rounds]
    return float(np.median(np.repeat(means, [answer.rounds for answer in with_rounds])))


def _tokens_per_second(answers: Sequence[Answer]) -> float:
    return _over(sum(len(answer.token_ids) for answer in answers), sum(answer.seconds for answer in answers))


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
