"""From a loaded phase to its figures, and to the verdict whether it held what it must. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from eagle_pangu.evaluation.exactness import divergences_of, not_exact, partial_match, without_draft
from eagle_pangu.evaluation.latency import Quantiles, quantiles_ms
from eagle_pangu.evaluation.load import LoadedPhase
from eagle_pangu.evaluation.records import Answer, Divergence, Numerics, near_tie_margin
from eagle_pangu.evaluation.teacher_state import Passes


@dataclass(frozen=True)
class PassFigures:
    """The teacher's forward passes during the load, by its own counters.

    rows_per_pass: asked for; computed_over_rows: rows computed / asked for, 1 where no shape is padded.
    realignment_share: time spent moving KV of earlier rounds / time of the passes. busy_share: time of the passes / the
    whole time. longest_wait_ms: of a session for its pass, since the teacher's start.
    """

    batching: str
    passes: int
    sessions_per_pass: float
    rows_per_pass: float
    computed_over_rows: float
    pass_ms: float
    realignment_share: float
    busy_share: float
    longest_wait_ms: float


@dataclass(frozen=True)
class TimeShares:
    """Where the time of the finished answers went, each 0 .. 1, together 1: sums of their own timings.

    teacher: in forward passes, which sessions share, `realignment` of it for moving KV. rest: commit, stop rules, text.
    """

    prefill: float
    draft: float
    wire_and_queue: float
    teacher: float
    realignment: float
    rest: float


@dataclass(frozen=True)
class LoadSummary:
    """The figures of a load. A figure that does not apply is None.

    tokens_per_second: answer tokens / seconds from the first request to the last answer. exact_match: share of the
    requests whose ids and finish reason are the reference's. partial_match: mean over the requests of the common prefix
    of ids / length of the reference; answers cancelled before their first token are left out.
    time_to_first_token_ms: from the request's arrival. between_tokens_ms: see `StreamedAnswer.between_tokens`.
    longest_wait_ms: longest time that a caller went without news. load_limited_share: of the rounds, those with a
    smaller tree because the teacher was shared. failures: what did not hold; empty when the run passed.
    """

    requests: int
    concurrency: int | None
    arrival_rate: float | None
    drafter: str
    seconds: float
    tokens: int
    tokens_per_second: float
    exact_match: float
    partial_match: float | None
    first_divergences: tuple[Divergence, ...]
    rounds: int
    tokens_per_round: float
    load_limited_share: float
    fallback_rounds: int
    fallback_reasons: tuple[str, ...]
    time_to_first_token_ms: Quantiles | None
    between_tokens_ms: Quantiles | None
    longest_wait_ms: float
    passes: PassFigures | None
    time_shares: TimeShares | None
    numerics: Numerics
    near_tie_margin: float
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The object of summary.json, without what the runner adds."""
        return asdict(self)


def summarise_load(
    phase: LoadedPhase, numerics: Numerics, drafter: str, *, near_tie: float | None = None
) -> LoadSummary:
    """The figures of at least one request.

    Args:
        phase: what happened.
        numerics: the teacher's own.
        drafter: that was asked for.
        near_tie: largest margin of a near-tie in logits; None: `near_tie_margin` of the teacher's dtype.

    Raises:
        ValueError: no request.
    """
    if not phase.records:
        raise ValueError("no request to sum up")
    tie = near_tie_margin(numerics.dtype) if near_tie is None else near_tie
    turns = [record.turn for record in phase.records]
    streamed = [record.streamed for record in phase.records]
    answers = [each.answer for each in streamed]
    firsts = [each.time_to_first_token for each in streamed if each.time_to_first_token is not None]
    gaps = [gap for each in streamed for gap in each.between_tokens]
    partial = [partial_match(turn) for turn in turns if turn.answer.token_ids]
    divergences = divergences_of(turns, answers, tie)
    tokens, rounds = sum(len(answer.token_ids) for answer in answers), sum(answer.rounds for answer in answers)
    return LoadSummary(
        requests=len(answers),
        concurrency=phase.load.concurrency,
        arrival_rate=phase.load.arrival_rate,
        drafter=drafter,
        seconds=phase.seconds,
        tokens=tokens,
        tokens_per_second=_over(tokens, phase.seconds),
        exact_match=1 - len(divergences) / len(answers),
        partial_match=sum(partial) / len(partial) if partial else None,
        first_divergences=divergences,
        rounds=rounds,
        tokens_per_round=_over(sum(len(answer.token_ids) - 1 for answer in answers if answer.rounds), rounds),
        load_limited_share=_over(sum(answer.load_limited_rounds for answer in answers), rounds),
        fallback_rounds=sum(answer.fallback_rounds for answer in answers),
        fallback_reasons=tuple(sorted({reason for answer in answers for reason in answer.fallback_reasons})),
        time_to_first_token_ms=quantiles_ms(firsts),
        between_tokens_ms=quantiles_ms(gaps),
        longest_wait_ms=1000 * max(each.longest_wait for each in streamed),
        passes=_pass_figures(phase),
        time_shares=_time_shares(answers, phase.passes),
        numerics=numerics,
        near_tie_margin=tie,
        failures=(*not_exact(divergences, numerics), *without_draft(answers)),
    )


def _pass_figures(phase: LoadedPhase) -> PassFigures | None:
    passes = phase.passes
    if passes is None or not passes.passes:
        return None
    return PassFigures(
        batching=phase.batching or "",
        passes=passes.passes,
        sessions_per_pass=passes.sessions / passes.passes,
        rows_per_pass=passes.rows / passes.passes,
        computed_over_rows=_over(passes.computed_rows, passes.rows),
        pass_ms=passes.pass_us / passes.passes / 1000,
        realignment_share=_over(passes.realign_us, passes.pass_us),
        busy_share=_over(passes.pass_us / 1e6, phase.seconds),
        longest_wait_ms=passes.longest_wait_us / 1000,
    )


def _time_shares(answers: Sequence[Answer], passes: Passes | None) -> TimeShares | None:
    timings = [answer.timings for answer in answers]
    whole = sum(each.prefill_us + each.rounds_us for each in timings)
    if not whole:
        return None
    prefill = sum(each.prefill_us for each in timings) / whole
    draft = sum(each.draft_us for each in timings) / whole
    wire_and_queue = sum(each.wire_us + each.queue_us for each in timings) / whole
    teacher = sum(each.teacher_us for each in timings) / whole
    realigned = 0.0 if passes is None else _over(passes.realign_us, passes.pass_us)
    rest = 1 - prefill - draft - wire_and_queue - teacher
    return TimeShares(prefill, draft, wire_and_queue, teacher, teacher * realigned, rest)


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
