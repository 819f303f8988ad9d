"""The paper's table: a row for each batching, drafter and batch size. Rows in, Markdown and JSON out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_pangu.evaluation.load_summary import LoadSummary, TimeShares
from eagle_pangu.evaluation.machine import machine

TABLE_FILE = "table.md"
RESULTS_FILE = "results.json"

HEADINGS = (
    *("batching", "drafter", "batch", "tokens/s", "over batch 1", "exact", "partial", "realignment", "tokens/round"),
    *("sessions/pass", "busy", "passes", "realigning", "draft", "wire + queue", "prefill", "rest"),
)
LEGEND = """\
over batch 1: tokens/s over those of batch 1 of the same batching and drafter. exact, partial: share of the answers with
the ids of teacher-only decoding one at a time, and mean common prefix / its length. realignment: share of the time of
the passes that moves KV of earlier rounds. busy: share of the whole time in which the teacher computes a pass. The last
six columns share out the time of the answers: in passes, of which realigning; in the draft; on the wire and in queues;
before the first token; the rest."""


class ResultsError(ValueError):
    """Earlier results that a run cannot go on with; the message names the file and what differs."""


@dataclass(frozen=True)
class BatchRow:
    """One line of the table; figures as in `LoadSummary`.

    size: requests at once. run: which start of the command measured it, from 1: rows of different runs were measured at
    different hours of a machine. divergences: requests that left their reference; near_ties: of these.
    """

    batching: str
    drafter: str
    size: int
    run: int
    tokens_per_second: float
    exact_match: float
    partial_match: float | None
    divergences: int
    near_ties: int
    tokens_per_round: float
    load_limited_share: float
    sessions_per_pass: float
    realignment_share: float
    busy_share: float
    time_shares: dict[str, float]
    failures: tuple[str, ...]

    @classmethod
    def of(cls, batching: str, size: int, run: int, summary: LoadSummary) -> BatchRow:
        """From the figures of the load, which must know its teacher's passes and the answers' times."""
        assert summary.passes is not None
        assert summary.time_shares is not None
        return cls(
            batching=batching,
            drafter=summary.drafter,
            size=size,
            run=run,
            tokens_per_second=summary.tokens_per_second,
            exact_match=summary.exact_match,
            partial_match=summary.partial_match,
            divergences=len(summary.first_divergences),
            near_ties=sum(divergence.near_tie for divergence in summary.first_divergences),
            tokens_per_round=summary.tokens_per_round,
            load_limited_share=summary.load_limited_share,
            sessions_per_pass=summary.passes.sessions_per_pass,
            realignment_share=summary.passes.realignment_share,
            busy_share=summary.passes.busy_share,
            time_shares=asdict(summary.time_shares),
            failures=summary.failures,
        )

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes it one line."""
        return self.batching, self.drafter, self.size


def write_results(output: Path, rows: Sequence[BatchRow], notes: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Write results.json and table.md anew; each is whole at any moment.

    Args:
        output: their folder.
        rows: measured until now.
        notes: what the table must say beside its figures.
        settings: that made them.
    """
    content = {"rows": [asdict(row) for row in rows], "notes": list(notes), "settings": settings, **machine()}
    _replace(output / RESULTS_FILE, json.dumps(content, indent=2) + "\n")
    _replace(output / TABLE_FILE, markdown(rows, notes))


def read_results(output: Path, settings: Mapping[str, Any]) -> list[BatchRow]:
    """The rows that an interrupted run has left.

    Raises:
        ResultsError: unreadable, or other settings.
    """
    path = output / RESULTS_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [BatchRow(**{**row, "failures": tuple(row["failures"])}) for row in content["rows"]]
        theirs = content["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path}: cannot be read as results: {error!r}") from error
    for name, ours in settings.items():
        if theirs.get(name) != ours:
            raise ResultsError(f"{path}: {name}: expected {ours!r}, as in this run, got {theirs.get(name)!r}")
    return rows


def markdown(rows: Sequence[BatchRow], notes: Iterable[str]) -> str:
    """The table, what its columns mean, and the notes."""
    head = ["| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * 2 + " ---: |" * (len(HEADINGS) - 2)]
    first = {(row.batching, row.drafter): row for row in rows if row.size == 1}
    lines = ["| " + " | ".join(_cells(row, first.get((row.batching, row.drafter)))) + " |" for row in rows]
    said = [LEGEND, *_marks(rows, first), *notes]
    return "\n".join([*head, *lines]) + "\n\n" + "\n\n".join(said) + "\n"


def _cells(row: BatchRow, first: BatchRow | None) -> list[str]:
    ratio = "" if first is None else f"{row.tokens_per_second / first.tokens_per_second:.2f}"
    if first is not None and first.run != row.run:
        ratio += " *"
    shares = TimeShares(**row.time_shares)
    parts = (shares.teacher, shares.realignment, shares.draft, shares.wire_and_queue, shares.prefill, shares.rest)
    return [
        *(row.batching, row.drafter, str(row.size), f"{row.tokens_per_second:.1f}", ratio),
        f"{row.exact_match:.1%}" + (f" ({row.near_ties} of {row.divergences} near-ties)" if row.divergences else ""),
        "" if row.partial_match is None else f"{row.partial_match:.1%}",
        f"{row.realignment_share:.1%}",
        f"{row.tokens_per_round:.2f}",
        f"{row.sessions_per_pass:.2f}",
        f"{row.busy_share:.0%}",
        *(f"{share:.0%}" for share in parts),
    ]


def _marks(rows: Sequence[BatchRow], first: Mapping[tuple[str, str], BatchRow]) -> list[str]:
    other = [row for row in rows if (one := first.get((row.batching, row.drafter))) and one.run != row.run]
    return ["\\* over a batch 1 that an earlier start of the command measured."] if other else []


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
