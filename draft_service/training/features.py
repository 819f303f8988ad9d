"""Stage 3: one pass of the teacher over every sequence; its features and what it predicted, kept on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_service.training.answers import Answer
from draft_service.training.settings import OnProgress, TrainingError
from draft_service.training.stages import write_json
from draft_service.training.store import TeacherRows, TeacherStore
from eagle_pangu.speculation.checkpoints import Checkpoint
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.engine import Engine

PROGRESS = "progress.json"
FLUSH_EVERY = 32  # sequences
CHUNK = 512  # tokens of one pass
HEAD_ROWS = 64  # answer tokens whose logits over the whole vocabulary exist at once


class ReadingTeacher:
    """The teacher over known sequences, in the engine that serves it, so that features are those that serving sends.

    Under `free` numerics: nothing here needs the same bits in every company, and `bitwise` costs time.

    Args:
        checkpoint: the teacher; its linear weights are given up to the engine.
        device: where it computes.
        longest: tokens of the longest sequence.
    """

    def __init__(self, checkpoint: Checkpoint, device: Device, longest: int) -> None:
        self._engine = Engine(checkpoint, device, numerics="free", slot_capacity=longest, max_rows=1, chunk=CHUNK)
        self._slot = self._engine.open_slot()
        self._model: Any = checkpoint.model
        self._vocab_size = checkpoint.vocab_size

    def read(self, sequence: Answer, rows: TeacherRows) -> None:
        """Fill the rows of one sequence."""
        token_ids = np.concatenate([sequence.prompt_ids, sequence.response_ids]).astype(np.int64)
        self._slot.truncate(0)
        with torch.inference_mode(), self._finals() as finals:
            for start in range(0, len(token_ids), CHUNK):
                chunk = token_ids[start : start + CHUNK]
                features = self._engine.prefill(self._slot, chunk, want_logits=False, want_features=True).features
                assert features is not None
                rows.features[start : start + len(chunk)] = features.cpu()
            predicting = torch.cat(finals)[len(sequence.prompt_ids) - 1 : -1]
            rows.finals.copy_(predicting)
            best = [self._argmax(part) for part in torch.split(predicting, HEAD_ROWS)]
            rows.argmax.copy_(torch.cat(best))

    def _argmax(self, finals: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows] ids, from the hidden states before they are rounded for the disk."""
        logits: torch.Tensor = self._model.lm_head(finals)
        return logits[:, : self._vocab_size].argmax(dim=-1)

    @contextmanager
    def _finals(self) -> Iterator[list[torch.Tensor]]:
        """Collects [tokens, hidden] after the last norm, pass by pass; the engine itself keeps none."""
        passes: list[torch.Tensor] = []
        hook = self._model.base_model.register_forward_hook(
            lambda module, args, output: passes.append(output.last_hidden_state[0])
        )
        try:
            yield passes
        finally:
            hook.remove()


def read_sequences(
    directory: Path, sequences: Sequence[Answer], store: TeacherStore, teacher: ReadingTeacher, on_progress: OnProgress
) -> None:
    """Fill the store from where an earlier run left it.

    Args:
        directory: of the stage; it notes how many sequences are on disk.
        sequences: in the store's order.
        store: open.
        teacher: reads them.
        on_progress: in tokens.
    """
    note = directory / PROGRESS
    done = int(note.read_text("utf-8")) if has_begun(directory) else 0
    tokens = sum(sequence.tokens for sequence in sequences[:done])
    total = sum(sequence.tokens for sequence in sequences)
    for index in range(done, len(sequences)):
        on_progress(tokens, total, "the teacher reads")
        teacher.read(sequences[index], store[index])
        tokens += sequences[index].tokens
        if (index + 1) % FLUSH_EVERY == 0 or index + 1 == len(sequences):
            store.flush()
            write_json(note, index + 1)
    on_progress(total, total, "the teacher reads")


def has_begun(directory: Path) -> bool:
    """Some sequences are on disk."""
    return (directory / PROGRESS).is_file()


def require_disk(store: TeacherStore, directory: Path) -> None:
    """Check that the features fit the disk, before an hour is spent on them.

    Raises:
        TrainingError: they do not.
    """
    free = shutil.disk_usage(directory).free
    if store.missing_bytes > free:
        raise TrainingError(
            f"--max-tokens: the features need {store.missing_bytes / 1e9:.1f} GB more in {directory}, where "
            f"{free / 1e9:.1f} GB are free; ask for fewer tokens"
        )
