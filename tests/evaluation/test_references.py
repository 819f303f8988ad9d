"""Reference answers: asked alone, kept in a file, and taken from it only where they belong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle_pangu.evaluation.prompts import PromptItem
from eagle_pangu.evaluation.records import Answer, Message
from eagle_pangu.evaluation.references import (
    REFERENCE_FILE,
    ReferenceKey,
    ReferenceMismatchError,
    read_references,
    references,
    require_all,
    shortened,
)

ITEMS = [PromptItem("a", "test", ("one", "never asked")), PromptItem("b", "test", ("two",))]
KEY = ReferenceKey("model", "hash", "float32", "bitwise", 3)


class FakeAsker:
    """Answers with a hash of the text; one at a time, which it checks. `fails` on this text."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[tuple[str, str]] = []
        self._fails = fails

    async def ask(self, messages: Sequence[Message], drafter: str, request_id: str) -> Answer:
        (message,) = messages
        if message.content == self._fails:
            raise RuntimeError("at fault")
        self.asked.append((message.content, drafter))
        return Answer(tuple(message.content.encode()), "text", "length", 0.5, 7, request_id, margins=(1.0, 0.5, 0.25))


async def written(directory: Path, asker: Any, **fields: Any) -> list[Answer]:
    arguments = {"known": {}, **fields}
    return await references(asker, ITEMS, KEY, directory / REFERENCE_FILE, **arguments)


async def test_first_turns_are_asked_teacher_only_and_the_file_gives_the_same_answers(tmp_path: Path) -> None:
    asker = FakeAsker()
    answers = await written(tmp_path, asker)
    assert asker.asked == [("one", "none"), ("two", "none")]
    known = read_references(tmp_path / REFERENCE_FILE, KEY)
    require_all(tmp_path, known, ITEMS)
    again = FakeAsker()
    assert await written(tmp_path, again, known=known) == answers
    assert again.asked == []
    assert read_references(tmp_path / REFERENCE_FILE, KEY) == known


async def test_an_interrupted_file_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="at fault"):
        await written(tmp_path, FakeAsker(fails="two"))
    path = tmp_path / REFERENCE_FILE
    with path.open("a") as file:
        file.write('{"half a li')
    known = read_references(path, KEY)
    with pytest.raises(ReferenceMismatchError, match="no answer to the first turn of 'b'"):
        require_all(path, known, ITEMS)
    asker = FakeAsker()
    await written(tmp_path, asker, known=known)
    assert asker.asked == [("two", "none")]
    require_all(path, read_references(path, KEY), ITEMS)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("tokenizer_sha256", "other"), ("dtype", "bfloat16"), ("policy", "free"), ("max_tokens", 4)],
)
async def test_answers_of_another_teacher_or_length_are_refused_by_name(
    tmp_path: Path, field: str, value: object
) -> None:
    await written(tmp_path, FakeAsker())
    with pytest.raises(ReferenceMismatchError, match=f"{field}: expected {value!r}"):
        read_references(tmp_path / REFERENCE_FILE, dataclasses.replace(KEY, **{field: value}))


async def test_an_answer_belongs_to_the_text_and_not_to_the_id(tmp_path: Path) -> None:
    await written(tmp_path, FakeAsker())
    known = read_references(tmp_path / REFERENCE_FILE, KEY)
    require_all(tmp_path, known, [PromptItem("renamed", "test", ("two",))])
    with pytest.raises(ReferenceMismatchError, match="'a'"):
        require_all(tmp_path, known, [PromptItem("a", "test", ("another text",))])


@pytest.mark.parametrize("content", [None, "", "no json\n", "[]\n", json.dumps({"key": {}}) + "\n{}\n"])
def test_what_is_no_reference_file_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / REFERENCE_FILE).write_text(content)
    with pytest.raises(ReferenceMismatchError, match=REFERENCE_FILE):
        read_references(tmp_path / REFERENCE_FILE, KEY)


def test_a_shorter_answer_is_a_beginning_and_a_longer_one_the_same() -> None:
    reference = Answer((1, 2, 3), "text", "stop", 1.0, 2, margins=(0.1, 0.2, 0.3))
    cut = shortened(reference, 2, "length")
    assert (cut.token_ids, cut.margins, cut.finish_reason) == ((1, 2), (0.1, 0.2), "length")
    assert shortened(reference, 3, "length") is reference
    assert shortened(reference, 9, "length") is reference
