"""The answers that loads are compared with: every prompt teacher-only, one at a time, kept in a file for later runs.

A load asks the first turns of items. Greedy answers do not depend on when they were computed, only on what the key says
and on the prompt, so one file serves a whole sweep.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle_pangu.evaluation.asking import TEACHER_ONLY, Asker, Teacher
from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.records import Answer, Message

REFERENCE_FILE = "reference.jsonl"
KEPT = ("token_ids", "text", "finish_reason", "seconds", "prompt_tokens", "request_id", "margins")

OnAnswer = Callable[[str, Answer], None]


class ReferenceMismatchError(ValueError):
    """Reference answers that do not belong to this run; the message names the file and what differs."""


@dataclass(frozen=True)
class ReferenceKey:
    """What the answers depend on beside the prompt."""

    model: str
    tokenizer_sha256: str
    dtype: str
    policy: str
    max_tokens: int

    @classmethod
    def of(cls, teacher: Teacher, max_tokens: int) -> ReferenceKey:
        """Of answers of that teacher."""
        numerics = teacher.numerics
        return cls(teacher.model, teacher.tokenizer_sha256, numerics.dtype, numerics.policy, max_tokens)


async def references(
    asker: Asker,
    items: Sequence[PromptItem],
    key: ReferenceKey,
    path: Path,
    *,
    known: Mapping[str, Answer],
    on_answer: OnAnswer = lambda item_id, answer: None,
) -> list[Answer]:
    """The reference of every item, in order; those that are not known are asked now, one after the other.

    Args:
        asker: of the orchestrator.
        items: what will be asked under load.
        key: of the asker's teacher.
        path: written anew: the known ones at once, each further one as soon as it is there.
        known: by digest of the prompt, from `read_references`.
        on_answer: called with the id of each item that is asked.

    Raises:
        AskError: an item got no answer; those before it are written.
    """
    answers: list[Answer] = []
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"key": asdict(key)}) + "\n")
        # What an earlier run knew is in the file before anything is asked, so that a second interruption loses none.
        file.writelines(_line(item, known[_digest(item)]) for item in items if _digest(item) in known)
        for item in items:
            answer = known.get(_digest(item))
            if answer is None:
                answer = await asker.ask([Message("user", item.turns[0])], TEACHER_ONLY, f"reference-{item.id}")
                file.write(_line(item, answer))
                file.flush()
                on_answer(item.id, answer)
            answers.append(answer)
    return answers


def read_references(path: Path, key: ReferenceKey) -> dict[str, Answer]:
    """The answers of a file, by digest of their prompt; a last line without its end is left out.

    Raises:
        ReferenceMismatchError: no such file, not such a file, or another key.
    """
    try:
        head, *lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        theirs: dict[str, Any] = json.loads(head)["key"]
        entries = [json.loads(line) for line in lines]
        answers = {entry["prompt_sha256"]: _answer(entry) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReferenceMismatchError(f"{path}: cannot be read as reference answers: {error!r}") from error
    for name, ours in asdict(key).items():
        if theirs.get(name) != ours:
            raise ReferenceMismatchError(f"{path}: {name}: expected {ours!r}, as in this run, got {theirs.get(name)!r}")
    return answers


def require_all(path: Path, known: Mapping[str, Answer], items: Sequence[PromptItem]) -> None:
    """Every item must have an answer.

    Raises:
        ReferenceMismatchError: names the first that has none.
    """
    for item in items:
        if _digest(item) not in known:
            raise ReferenceMismatchError(f"{path}: prompts: no answer to the first turn of {item.id!r} of this run")


def shortened(reference: Answer, tokens: int, finish_reason: str) -> Answer:
    """The answer that a request for so many tokens gets: the same beginning. It is the whole one where that is shorter.

    finish_reason: of an answer that ends there though the reference goes on.
    """
    if tokens >= len(reference.token_ids):
        return reference
    beginning, margins = reference.token_ids[:tokens], reference.margins[:tokens]
    return replace(reference, token_ids=beginning, margins=margins, finish_reason=finish_reason)


def _digest(item: PromptItem) -> str:
    return hashlib.sha256(item.turns[0].encode()).hexdigest()


def _line(item: PromptItem, answer: Answer) -> str:
    kept = {name: getattr(answer, name) for name in KEPT}
    return json.dumps({"id": item.id, "prompt_sha256": _digest(item), **kept}) + "\n"


def _answer(entry: Mapping[str, Any]) -> Answer:
    return Answer(
        token_ids=tuple(entry["token_ids"]),
        text=entry["text"],
        finish_reason=entry["finish_reason"],
        seconds=entry["seconds"],
        prompt_tokens=entry["prompt_tokens"],
        request_id=entry["request_id"],
        margins=tuple(entry["margins"]),
    )
