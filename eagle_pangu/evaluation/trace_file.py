"""Reads a trace: the lines that the orchestrator wrote, by answer. Schema ``eagle_pangu.trace/4``.

The orchestrator's own trace module documents every field; the names here are the same. Fields that this reader does not
know are passed over, so a trace may grow.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

MODELS = ("draft", "teacher")


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and field."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    schema_name: Literal["eagle_pangu.trace/4"] = Field(alias="schema")
    request_id: str
    answer: int
    epoch: int


class Budget(BaseModel):
    """The most that a tree of this request may hold; see TreeBudget."""

    rows: int
    depth: int


class TracedTree(BaseModel):
    """Columns of the tree, [rows] each; row 0 is the root."""

    token_ids: tuple[int, ...] = Field(min_length=1)
    parents: tuple[int, ...]
    scores: tuple[float, ...] | None


class TracedBatch(BaseModel):
    """The teacher's pass: sessions in it, rows of all of them, and its time that moving KV took, in microseconds."""

    sessions: int
    rows: int
    realign_us: int


class OpenLine(_Line):
    """The first token is decided."""

    event: Literal["open"]
    drafter: str
    budget: Budget
    prompt_tokens: int
    max_tokens: int
    first_token_id: int
    prefill_us: int


class RoundLine(_Line):
    """One round; `times_us` by part, their sum is the round."""

    event: Literal["round"]
    round: int
    committed_length: int
    tree: TracedTree
    accepted_rows: tuple[int, ...]
    next_token_id: int
    kept: int
    commit: int
    fallback: str | None
    load_limited: bool
    reopened: bool
    batch: TracedBatch
    times_us: dict[str, int]

    @property
    def total_us(self) -> int:
        """The whole round, in microseconds."""
        return sum(self.times_us.values())

    @property
    def outside_models_us(self) -> int:
        """The round without the two models' compute, in microseconds."""
        return self.total_us - sum(self.times_us.get(part, 0) for part in MODELS)


class EndLine(_Line):
    """The answer is over."""

    event: Literal["end"]
    status: str
    finish_reason: str | None
    token_ids: tuple[int, ...]
    rounds: int
    drafted: int
    accepted: int
    fallback_rounds: int
    fallback_reasons: tuple[str, ...]
    load_limited_rounds: int


AnyLine = Annotated[OpenLine | RoundLine | EndLine, Field(discriminator="event")]
_LINE: TypeAdapter[OpenLine | RoundLine | EndLine] = TypeAdapter(AnyLine)


@dataclass
class TracedAnswer:
    """The lines of one answer; `end` is None while it runs, or when its process was killed."""

    opened: OpenLine
    rounds: list[RoundLine] = field(default_factory=list)
    end: EndLine | None = None

    @property
    def request_id(self) -> str:
        """As the client or the orchestrator chose it; a file may hold one id several times, one after another."""
        return self.opened.request_id

    @property
    def index(self) -> int:
        """Of the answer within its request."""
        return self.opened.answer


def read_trace(path: Path) -> list[TracedAnswer]:
    """The answers of a trace file, in the order in which they opened; a last line without its end is left out.

    Raises:
        TraceError: unreadable file, a line that breaks the schema, a round or an end without its open.
    """
    answers: list[TracedAnswer] = []
    running: dict[tuple[str, int], TracedAnswer] = {}
    for number, line in _lines(path):
        key = (line.request_id, line.answer)
        match line:
            case OpenLine():
                running[key] = TracedAnswer(line)
                answers.append(running[key])
            case _ if key not in running:
                where = f"answer {line.answer} of {line.request_id!r}"
                raise TraceError(f"{path}:{number}: request_id: {line.event} of {where}, which is not open")
            case RoundLine():
                running[key].rounds.append(line)
            case EndLine():
                running.pop(key).end = line
    return answers


def ends_within_a_line(path: Path) -> bool:
    """The last line is being written, or its writer was killed: `read_trace` leaves it out."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def outside_models_ms(answers: Iterable[TracedAnswer], request_ids: Collection[str]) -> list[float]:
    """Milliseconds outside the two models' compute of every round of these requests."""
    return [
        line.outside_models_us / 1000
        for answer in answers
        if answer.request_id in request_ids
        for line in answer.rounds
    ]


def _lines(path: Path) -> Iterator[tuple[int, OpenLine | RoundLine | EndLine]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    # A last line without its end is left out: `ends_within_a_line`.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            yield number, _LINE.validate_json(line)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in fault["loc"]) or "line"
            raise TraceError(f"{path}:{number}: {where}: {fault['msg']}") from error
