"""Prompt files: one JSON object a line, read strictly, and the set that ships with this project.

A line is ``{"id": ..., "source": ..., "turns": [...]}`` with an optional ``"category"``; ``turns`` are the user's
messages in order. A fault stops the run and names file, line and field. It knows nothing of models or services.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeVar

REQUIRED = ("id", "source", "turns")
OPTIONAL = ("category",)

T = TypeVar("T")


class PromptFileError(ValueError):
    """A prompt file breaks a rule.

    Attributes:
        path: The file.
        line: Line at fault, counted from 1; 0 when the fault is the file's.
        field: Field at fault, such as ``turns[1]``; empty when the line or the file is.
    """

    def __init__(self, path: Path, line: int, field: str, reason: str) -> None:
        self.path = path
        self.line = line
        self.field = field
        where = f"{path}:{line}" if line else f"{path}"
        super().__init__(f"{where}: {field}: {reason}" if field else f"{where}: {reason}")


@dataclass(frozen=True)
class PromptItem:
    """One conversation to run: its user messages in order."""

    id: str
    source: str
    turns: tuple[str, ...]
    category: str = ""


def load_prompts(path: Path) -> list[PromptItem]:
    """Every item of a prompt file, in its order. Blank lines are skipped.

    Raises:
        PromptFileError: unreadable file, a line that is not such an object, an unknown field, a repeated id, no item.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(path, 0, "", f"cannot be read: {error}") from error
    items: list[PromptItem] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        item = _item(path, number, line)
        if item.id in line_of_id:
            raise PromptFileError(path, number, "id", f"{item.id!r} stands on line {line_of_id[item.id]} already")
        line_of_id[item.id] = number
        items.append(item)
    if not items:
        raise PromptFileError(path, 0, "", "expected at least one item")
    return items


def default_prompts() -> list[PromptItem]:
    """The set written for this project (Apache-2.0): chat, code, rewriting, extraction, lists; some in two turns."""
    with as_file(files(__package__ or __name__) / "default.jsonl") as path:
        return load_prompts(path)


def spread(items: Sequence[T], limit: int) -> list[T]:
    """`limit` items spread evenly over the sequence, in its order, always the same ones; all when there are fewer.

    Choice k is item floor(k * n / limit): the first is always taken, and gaps differ by at most one.

    Raises:
        ValueError: limit < 1.
    """
    if limit < 1:
        raise ValueError(f"limit: expected at least 1, got {limit}")
    if limit >= len(items):
        return list(items)
    return [items[k * len(items) // limit] for k in range(limit)]


def _item(path: Path, number: int, line: str) -> PromptItem:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(path, number, "", f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(entry, dict):
        raise PromptFileError(path, number, "", f"expected an object, got {type(entry).__name__}")
    for field in REQUIRED:
        if field not in entry:
            raise PromptFileError(path, number, field, "missing")
    for field in entry:
        if field not in REQUIRED + OPTIONAL:
            raise PromptFileError(path, number, field, f"unknown; expected {', '.join(REQUIRED + OPTIONAL)}")
    for field in ("id", "source", *(name for name in OPTIONAL if name in entry)):
        _require_text(path, number, field, entry[field])
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns:
        raise PromptFileError(path, number, "turns", f"expected a list of at least one message, got {turns!r:.60}")
    for index, turn in enumerate(turns):
        _require_text(path, number, f"turns[{index}]", turn)
    return PromptItem(entry["id"], entry["source"], tuple(turns), entry.get("category", ""))


def _require_text(path: Path, number: int, field: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise PromptFileError(path, number, field, f"expected a non-empty string, got {value!r:.60}")
