"""The store, and what the teacher's pass writes into it, against transformers' own hidden states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.training import features as stage
from draft_service.training.answers import Answer
from draft_service.training.features import ReadingTeacher, read_sequences, require_disk
from draft_service.training.settings import TrainingError
from draft_service.training.store import TeacherStore
from eagle_pangu.speculation.devices import get_device
from tests.draft_service.training.toy import loaded, toy_teacher
from tests.models import VOCAB_SIZE

HIDDEN = 32


def sequences(*shapes: tuple[int, int]) -> list[Answer]:
    """(prompt, response) tokens of each."""
    random = np.random.default_rng(0)
    ids = [[random.integers(VOCAB_SIZE, size=size).astype(np.int32) for size in shape] for shape in shapes]
    return [Answer(str(number), True, *pair) for number, pair in enumerate(ids)]


def opened(directory: Path, rows: list[Answer]) -> TeacherStore:
    store = TeacherStore(directory, rows, HIDDEN)
    store.make()
    store.open()
    return store


def test_a_store_keeps_every_sequence_apart_and_on_disk(tmp_path: Path) -> None:
    rows = sequences((3, 2), (1, 4), (2, 1))
    store = opened(tmp_path, rows)
    for number in range(3):
        for part in store[number]:
            part.fill_(number + 1)
    store.flush()
    again = opened(tmp_path, rows)
    for number, row in enumerate(rows):
        features, finals, argmax = again[number]
        assert features.shape == (row.tokens, 3 * HIDDEN)
        assert finals.shape == (len(row.response_ids), HIDDEN)
        assert all(bool((part == number + 1).all()) for part in (features, finals, argmax))
    assert again.all_argmax().tolist() == [1, 1, 2, 2, 2, 2, 3]
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) == store.size_bytes


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_file_that_was_lost_is_not_read_as_zeros(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    rows = sequences((3, 2), (1, 4))
    opened(tmp_path, rows)
    damage(tmp_path / "finals.bin")
    with pytest.raises(TrainingError, match=r"finals\.bin: expected a file of 384 bytes; delete"):
        TeacherStore(tmp_path, rows, HIDDEN).open()


@pytest.mark.parametrize("layers", [4, 7])
def test_the_teacher_s_rows_are_transformers_own(tmp_path: Path, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "CHUNK", 8)  # the longer sequence takes three passes
    monkeypatch.setattr(stage, "HEAD_ROWS", 4)
    directory = toy_teacher(tmp_path / "teacher", num_hidden_layers=layers)
    rows = sequences((7, 13), (3, 2))
    store = opened(tmp_path, rows)
    read_sequences(tmp_path, rows, store, ReadingTeacher(loaded(directory), get_device("cpu"), 20), lambda *_: None)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for number, row in enumerate(rows):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
        predicting = slice(len(row.prompt_ids) - 1, -1)
        entries = [min(index, layers - 1) for index in (2, layers // 2, layers - 3)]
        expected = torch.cat([output.hidden_states[index][0] for index in entries], dim=-1)
        features, finals, argmax = store[number]
        torch.testing.assert_close(features.float(), expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(finals.float(), output.hidden_states[-1][0, predicting], atol=1e-2, rtol=1e-2)
        assert argmax.tolist() == output.logits[0, predicting].argmax(-1).tolist()


def test_a_killed_pass_goes_on_after_the_last_sequences_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "FLUSH_EVERY", 2)
    rows = sequences(*[(3, 2)] * 7)
    read: list[str] = []

    class Reader:
        def __init__(self, dies_at: int) -> None:
            self.dies_at = dies_at

        def read(self, sequence: Answer, target: object) -> None:
            if int(sequence.id) == self.dies_at:
                raise KeyboardInterrupt
            read.append(sequence.id)

    told: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        read_sequences(tmp_path, rows, opened(tmp_path, rows), Reader(5), lambda *_: None)  # type: ignore[arg-type]
    read_sequences(
        tmp_path,
        rows,
        opened(tmp_path, rows),
        Reader(-1),
        lambda done, total, what: told.append(done),  # type: ignore[arg-type]
    )
    assert read == ["0", "1", "2", "3", "4", "4", "5", "6"]
    assert told == [20, 25, 30, 35]


def test_a_disk_that_is_too_small_is_refused_before_the_pass(tmp_path: Path) -> None:
    large = [Answer("a", True, np.broadcast_to(np.int32(0), 10**13), np.zeros(1, np.int32))]
    with pytest.raises(TrainingError, match=r"--max-tokens: the features need .* GB more"):
        require_disk(TeacherStore(tmp_path, large, HIDDEN), tmp_path)
