"""Answers: read strictly from files, and made by the teacher."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.training import answering
from draft_service.training.answering import AnsweringTeacher, answer_prompts
from draft_service.training.answers import Answer, read_answers, summary
from draft_service.training.settings import TrainingError
from eagle_pangu.evaluation.prompts import PromptItem
from tests.draft_service.training.toy import CPU, toy_teacher
from tests.models import EOS, VOCAB_SIZE, byte_tokenizer
from tests.openpangu import toy_openpangu

LINE: dict[str, Any] = {"id": "a", "greedy": True, "prompt_ids": [1, 2], "response_ids": [3]}
LIMITS = {"vocab_size": 10, "context_limit": 8}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_answers_come_back_as_they_were_written_compressed_or_not(tmp_path: Path) -> None:
    answer = Answer("é#1", False, np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.int32))
    plain, compressed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text(answer.to_line(), encoding="utf-8")
    compressed.write_bytes(gzip.compress(answer.to_line().encode()))
    for path in (plain, compressed):
        [read] = read_answers(path, **LIMITS)
        assert read.to_line() == answer.to_line()
        assert read.conversation == "é"
        assert read.tokens == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object with the fields id, greedy"),
        ({**LINE, "more": 1}, "expected an object with the fields"),
        ({**LINE, "id": ""}, "id: expected a non-empty string"),
        ({**LINE, "greedy": 1}, "greedy: expected true or false, got 1"),
        ({**LINE, "prompt_ids": []}, "prompt_ids: expected a non-empty list"),
        ({**LINE, "response_ids": [3, 10]}, r"response_ids\[1\]: expected an id in \[0, 10\), got 10"),
        ({**LINE, "response_ids": [True]}, r"response_ids\[0\]: expected an id"),
        ({**LINE, "prompt_ids": [-1]}, r"prompt_ids\[0\]: expected an id"),
        ({**LINE, "prompt_ids": [1] * 8}, "expected at most 8 tokens together"),
        ({**LINE, "id": "b"}, "id: 'b' stands on an earlier line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    path = written(tmp_path / "a.jsonl", {**LINE, "id": "b"}, line)
    with pytest.raises(TrainingError, match=f"a.jsonl:2: .*{said}"):
        read_answers(path, **LIMITS)


@pytest.mark.parametrize(("content", "said"), [(b"", "at least one answer"), (b"\xff", "cannot be read")])
def test_a_file_without_answers_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(TrainingError, match=said):
        read_answers(tmp_path / "a.jsonl", **LIMITS)


# What the teacher answers.

ITEMS = [PromptItem(f"p{number}", "toy", (f"{number * 7919}?",)) for number in range(40)] + [
    PromptItem("talk", "toy", ("first", "second", "third"))
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def teacher(directory: Path) -> AnsweringTeacher:
    return answering_teacher(directory)


def answering_teacher(directory: Path, context_limit: int = 512) -> AnsweringTeacher:
    limits = {"vocab_size": VOCAB_SIZE, "context_limit": context_limit}
    return AnsweringTeacher(directory, dtype=torch.float32, device=CPU, eos_token_ids=[EOS], **limits)


def ask(path: Path, teacher: AnsweringTeacher, seed: int = 0) -> list[Answer]:
    return answer_prompts(path, ITEMS, teacher, max_new_tokens=9, seed=seed, on_progress=lambda *_: None)


def test_every_turn_is_answered_once_and_both_ways_are_used(teacher: AnsweringTeacher, tmp_path: Path) -> None:
    answers = ask(tmp_path / "a.jsonl", teacher)
    assert sorted(answer.id for answer in answers) == sorted([*(item.id for item in ITEMS), "talk#1", "talk#2"])
    assert {answer.greedy for answer in answers} == {True, False}
    assert all(1 <= len(answer.response_ids) <= 9 for answer in answers)
    read = read_answers(tmp_path / "a.jsonl", vocab_size=VOCAB_SIZE, context_limit=512)
    assert [answer.to_line() for answer in read] == [answer.to_line() for answer in answers]
    assert summary(read)["answers"] == 43


def test_a_greedy_answer_is_the_model_s_own(directory: Path, teacher: AnsweringTeacher, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for answer in ask(tmp_path / "a.jsonl", teacher):
        if answer.greedy:
            ids = np.concatenate([answer.prompt_ids, answer.response_ids])
            best = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0].argmax(-1)
            assert answer.response_ids.tolist() == best[len(answer.prompt_ids) - 1 : -1].tolist()


def test_an_answer_ends_with_the_first_ending_id(directory: Path, teacher: AnsweringTeacher) -> None:
    prompts, asked = [[1, 2], [3, 4, 5], [6]], {"greedy": True, "max_new_tokens": 12, "seed": 0}
    whole = [response.tolist() for response in teacher.answer(prompts, **asked)]
    end = whole[0][4]
    limits = {"vocab_size": VOCAB_SIZE, "context_limit": 512}
    ending = AnsweringTeacher(directory, dtype=torch.float32, device=CPU, eos_token_ids=[end], **limits)
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in whole]
    assert [response.tolist() for response in ending.answer(prompts, **asked)] == expected
    assert len(expected[0]) <= 5 < max(map(len, expected))


def test_a_later_turn_quotes_the_answers_before_it(teacher: AnsweringTeacher, tmp_path: Path) -> None:
    by_id = {answer.id: answer for answer in ask(tmp_path / "a.jsonl", teacher)}
    said = teacher.text(by_id["talk"].response_ids.tolist())
    prompt = byte_tokenizer().decode(by_id["talk#1"].prompt_ids.tolist(), skip_special_tokens=False)
    assert prompt == (
        f"<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
        "<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_file_cut_anywhere_is_completed_to_what_it_would_have_been(teacher: AnsweringTeacher, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    ask(path, teacher)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for kept in (0, len(lines[0]) // 2, len(b"".join(lines[:7])), len(b"".join(lines[:35])) + 20, len(whole) - 1):
        path.write_bytes(whole[:kept])
        ask(path, teacher)
        assert path.read_bytes() == whole


def test_another_seed_samples_otherwise(teacher: AnsweringTeacher, tmp_path: Path) -> None:
    ask(tmp_path / "a.jsonl", teacher, seed=0)
    ask(tmp_path / "b.jsonl", teacher, seed=1)
    assert (tmp_path / "a.jsonl").read_bytes() != (tmp_path / "b.jsonl").read_bytes()


def test_prompts_without_room_in_the_context_are_left_out(directory: Path, tmp_path: Path) -> None:
    teacher = answering_teacher(directory, context_limit=60)
    answers = ask(tmp_path / "a.jsonl", teacher)
    assert "talk" in {answer.id for answer in answers}
    assert "talk#2" not in {answer.id for answer in answers}
    assert all(answer.tokens <= 60 for answer in answers)
    with pytest.raises(TrainingError, match="no prompt leaves room"):
        ask(tmp_path / "b.jsonl", answering_teacher(directory, context_limit=5))


def test_padding_rows_of_the_embedding_are_never_chosen(directory: Path, tmp_path: Path) -> None:
    limits = {"vocab_size": 100, "context_limit": 512}
    teacher = AnsweringTeacher(directory, dtype=torch.float32, device=CPU, eos_token_ids=[EOS], **limits)
    responses = teacher.answer([[1, 2], [3, 4, 5]], greedy=False, max_new_tokens=40, seed=0)
    assert max(response.max() for response in responses) < 100


def test_what_the_checkpoint_suggests_for_generation_is_not_followed(directory: Path, tmp_path: Path) -> None:
    suggesting = toy_teacher(tmp_path / "teacher")
    (suggesting / "generation_config.json").write_text(json.dumps({"repetition_penalty": 5.0, "eos_token_id": EOS}))
    prompts = [[1, 2], [3, 4, 5]]
    said = [
        answering_teacher(place).answer(prompts, greedy=True, max_new_tokens=20, seed=0)
        for place in (directory, suggesting)
    ]
    assert [response.tolist() for response in said[0]] == [response.tolist() for response in said[1]]


def test_a_teacher_without_a_template_cannot_be_asked(tmp_path: Path) -> None:
    directory = toy_teacher(tmp_path)
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TrainingError, match="no chat template"):
        answering_teacher(directory)


def test_a_tokenizer_that_is_code_of_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    (directory / "tokenization_openpangu.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    limits = {"vocab_size": 440, "context_limit": 64}
    with pytest.raises(TrainingError, match="its tokenizer cannot ask prompts; use --answers"):
        AnsweringTeacher(directory, dtype=torch.float32, device=CPU, eos_token_ids=[EOS], **limits)
    assert not (tmp_path / "ran").exists()


def test_a_batch_is_of_one_kind_and_bounded() -> None:
    questions = [answering.Question(str(n), n % 3 == 0, [1] * (n % 5 + 1)) for n in range(100)]
    batches = list(answering._batches(questions))
    assert sorted(question.id for batch in batches for question in batch) == sorted(map(str, range(100)))
    for batch in batches:
        assert len({question.greedy for question in batch}) == 1
        assert len(batch) <= answering.BATCH
