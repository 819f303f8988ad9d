"""Figures as tables for a terminal. Formats what is given; measures and decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from eagle_pangu.evaluation.latency import Quantiles
from eagle_pangu.evaluation.load_summary import LoadSummary
from eagle_pangu.evaluation.records import Numerics
from eagle_pangu.evaluation.soak import SoakSummary
from eagle_pangu.evaluation.summary import Summary


def summary_table(summary: Summary) -> Table:
    """The figures of a run, one a line; those that do not apply are left out."""
    return _table(summary.drafter, summary.numerics, _figures(summary))


def load_table(summary: LoadSummary) -> Table:
    """The figures of a load, one a line; those that do not apply are left out."""
    return _table(summary.drafter, summary.numerics, _load_figures(summary))


def soak_table(summary: SoakSummary) -> Table:
    """The figures of an endurance run: those of its load, and its own."""
    load = summary.load
    return _table(load.drafter, load.numerics, [*_load_figures(load), *_soak_figures(summary)])


def _table(drafter: str, numerics: Numerics, figures: Iterable[tuple[str, str]]) -> Table:
    table = Table("figure", title=f"{drafter}, {numerics.dtype}, {numerics.policy}, {numerics.mode}")
    table.add_column("value", justify="right")
    for name, text in figures:
        table.add_row(name, text)
    return table


def _figures(summary: Summary) -> Iterable[tuple[str, str]]:
    yield "turns", str(summary.turns)
    yield "tokens", str(summary.tokens)
    if summary.exact_match is not None:
        yield "equal to teacher-only", f"{summary.exact_match:.1%}"
        yield "tokens per round", f"{summary.tokens_per_round:.2f}"
        yield "accepted length, mean", f"{summary.accepted_length_mean:.2f}"
    if summary.speedup_mean is not None:
        yield "speed-up, mean", f"{summary.speedup_mean:.2f}"
        yield "speed-up, p1 / p50 / p99", _joined(summary.speedup_p1, summary.speedup_p50, summary.speedup_p99)
        yield "turns slower than teacher-only", f"{summary.share_below_1 or 0:.1%}"
    if summary.decode_speedup_mean is not None:
        yield "speed-up without prefill, mean", f"{summary.decode_speedup_mean:.2f}"
    if summary.exact_match is not None:
        yield "tokens/s", f"{summary.tokens_per_second:.1f}"
    yield "tokens/s, teacher-only", f"{summary.teacher_only_tokens_per_second:.1f}"
    if summary.transformers_tokens_per_second is not None:
        yield "tokens/s, transformers' generate", f"{summary.transformers_tokens_per_second:.1f}"
        yield "teacher-only / transformers", f"{summary.teacher_only_over_transformers or 0:.2f}"
        yield "teacher-only equal to transformers", f"{summary.transformers_exact_match or 0:.1%}"
    if summary.prompt_lookup_speedup_mean is not None:
        quantiles = (
            summary.prompt_lookup_speedup_p1,
            summary.prompt_lookup_speedup_p50,
            summary.prompt_lookup_speedup_p99,
        )
        yield "transformers' prompt lookup: speed-up, mean", f"{summary.prompt_lookup_speedup_mean:.2f}"
        yield "  p1 / p50 / p99", _joined(*quantiles)
        yield "  equal to transformers' greedy", f"{summary.prompt_lookup_exact_match or 0:.1%}"
    yield "round, mean", f"{summary.round_ms['total']:.1f} ms"
    for part, milliseconds in summary.round_ms.items():
        if part != "total":
            yield f"  {part}", f"{milliseconds:.2f} ms"
    yield "outside the models, p50", f"{summary.outside_models_ms_p50:.2f} ms"


def _joined(*values: float | None) -> str:
    return " / ".join(f"{value:.2f}" for value in values if value is not None)


def _load_figures(summary: LoadSummary) -> Iterable[tuple[str, str]]:
    yield "requests", str(summary.requests)
    if summary.concurrency is not None:
        yield "at once, at most", str(summary.concurrency)
    if summary.arrival_rate is not None:
        yield "arrivals/s", f"{summary.arrival_rate:g}"
    yield "tokens", str(summary.tokens)
    yield "tokens/s", f"{summary.tokens_per_second:.1f}"
    yield "equal to teacher-only", f"{summary.exact_match:.1%}"
    if summary.partial_match is not None:
        yield "partial match", f"{summary.partial_match:.1%}"
    yield "tokens per round", f"{summary.tokens_per_round:.2f}"
    yield "rounds with fewer rows for the load", f"{summary.load_limited_share:.1%}"
    if summary.time_to_first_token_ms is not None:
        yield "to the first token, p50 / p95 / p99", _milliseconds(summary.time_to_first_token_ms)
    if summary.between_tokens_ms is not None:
        yield "between tokens, p50 / p95 / p99", _milliseconds(summary.between_tokens_ms)
    yield "longest wait for news", f"{summary.longest_wait_ms:.0f} ms"
    if (passes := summary.passes) is not None:
        yield "batching", passes.batching
        yield "sessions per pass", f"{passes.sessions_per_pass:.2f}"
        yield "rows per pass", f"{passes.rows_per_pass:.2f}"
        yield "rows computed / asked for", f"{passes.computed_over_rows:.2f}"
        yield "pass, mean", f"{passes.pass_ms:.1f} ms"
        yield "realignment, share of the passes", f"{passes.realignment_share:.1%}"
        yield "passes, share of the time", f"{passes.busy_share:.1%}"
        yield "longest wait for a pass, since the start", f"{passes.longest_wait_ms:.0f} ms"
    if (shares := summary.time_shares) is not None:
        yield "time of an answer: prefill", f"{shares.prefill:.1%}"
        yield "  draft", f"{shares.draft:.1%}"
        yield "  wire and queue", f"{shares.wire_and_queue:.1%}"
        yield "  teacher", f"{shares.teacher:.1%}"
        yield "  rest", f"{shares.rest:.1%}"


def _soak_figures(summary: SoakSummary) -> Iterable[tuple[str, str]]:
    yield "finished", str(summary.finished)
    yield "cancelled", str(summary.cancelled)
    yield "  before the first token", str(summary.cancelled_before_first_token)
    yield "free slots, before / after", f"{summary.free_before.slots} / {summary.free_after.slots}"
    yield "free KV tokens, before / after", f"{summary.free_before.kv_tokens} / {summary.free_after.kv_tokens}"
    for name, memory in summary.memory_mib.items():
        if known := [value for value in memory if value is not None]:
            yield f"memory of the {name}, before / halfway / after", " / ".join(map("{:.0f}".format, known)) + " MiB"


def _milliseconds(quantiles: Quantiles) -> str:
    return " / ".join(f"{value:.0f}" for value in quantiles) + " ms"
