"""Files of a teacher's answers, one JSON object a line: `{"id", "greedy", "prompt_ids", "response_ids"}`.

Read strictly: a fault names file, line and field. What made the answers is not known here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.training.settings import TrainingError

FIELDS = ("id", "greedy", "prompt_ids", "response_ids")
TURN_MARK = "#"
"""Ids of later turns are the conversation's id, this mark and the turn's number."""


class Answer(NamedTuple):
    """One answer and what it answers.

    id: unique in its file. greedy: decoded greedily, else sampled. prompt_ids, response_ids: int32, both non-empty.
    """

    id: str
    greedy: bool
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]

    @property
    def conversation(self) -> str:
        """The id without its turn: answers of one conversation share text."""
        return self.id.split(TURN_MARK)[0]

    @property
    def tokens(self) -> int:
        """Of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    def to_line(self) -> str:
        """As it stands in a file, line break included."""
        entry = self._asdict() | {name: getattr(self, name).tolist() for name in ("prompt_ids", "response_ids")}
        return json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"


def read_answers(path: Path, *, vocab_size: int, context_limit: int) -> list[Answer]:
    """Every answer of a .jsonl or .jsonl.gz file, in its order.

    Args:
        path: the file.
        vocab_size: ids are below it.
        context_limit: most tokens of prompt and response together.

    Raises:
        TrainingError: unreadable file, a line that is not such an object, a repeated id, no answer at all.
    """
    answers: list[Answer] = []
    seen: set[str] = set()
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}:{number}"
        answer = _answer(where, line, vocab_size)
        if answer.id in seen:
            raise TrainingError(f"{where}: id: {answer.id!r} stands on an earlier line already")
        if answer.tokens > context_limit:
            raise TrainingError(
                f"{where}: prompt_ids and response_ids: expected at most {context_limit} tokens together, the "
                f"teacher's context, got {answer.tokens}"
            )
        seen.add(answer.id)
        answers.append(answer)
    if not answers:
        raise TrainingError(f"{path}: expected at least one answer")
    return answers


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path}: cannot be read: {error}") from error


def _answer(where: str, line: str, vocab_size: int) -> Answer:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrainingError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(entry, dict) or sorted(entry) != sorted(FIELDS):
        raise TrainingError(f"{where}: expected an object with the fields {', '.join(FIELDS)}, got {line!r:.80}")
    if not isinstance(entry["id"], str) or not entry["id"]:
        raise TrainingError(f"{where}: id: expected a non-empty string, got {entry['id']!r:.60}")
    if not isinstance(entry["greedy"], bool):
        raise TrainingError(f"{where}: greedy: expected true or false, got {entry['greedy']!r:.60}")
    ids = [_ids(f"{where}: {name}", entry[name], vocab_size) for name in ("prompt_ids", "response_ids")]
    return Answer(entry["id"], entry["greedy"], *ids)


def _ids(where: str, value: Any, vocab_size: int) -> NDArray[np.int32]:
    if not isinstance(value, list) or not value:
        raise TrainingError(f"{where}: expected a non-empty list of token ids, got {value!r:.60}")
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise TrainingError(f"{where}[{index}]: expected an id in [0, {vocab_size}), got {token_id!r:.60}")
    return np.array(value, dtype=np.int32)


def summary(answers: Sequence[Answer]) -> dict[str, int]:
    """Figures of a set of answers."""
    responses = [answer.response_ids for answer in answers]
    return {
        "answers": len(answers),
        "greedy_answers": sum(answer.greedy for answer in answers),
        "prompt_tokens": sum(len(answer.prompt_ids) for answer in answers),
        "answer_tokens": sum(map(len, responses)),
        "distinct_answer_ids": len(np.unique(np.concatenate(responses))),
    }
