"""Figures as tables for a terminal. Formats what is given; measures and decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from eagle_pangu.evaluation.summary import Summary


def summary_table(summary: Summary) -> Table:
    """The figures of a run, one a line; those that do not apply are left out."""
    numerics = summary.numerics
    table = Table("figure", title=f"{summary.drafter}, {numerics.dtype}, {numerics.policy}, {numerics.mode}")
    table.add_column("value", justify="right")
    for name, text in _figures(summary):
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
