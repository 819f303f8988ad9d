"""What training reads of the teacher, on disk: memory-mapped arrays, one row a token.

A file is made at its full size and filled sequence by sequence; what is not on disk after a kill is written again.
Nothing here knows where the values come from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from draft_service.training.answers import Answer
from draft_service.training.settings import TrainingError


class TeacherRows(NamedTuple):
    """One sequence of n tokens, of which the last m are the answer.

    features: [n, 3 * hidden] bfloat16, of each token. finals: [m, hidden] bfloat16, the hidden state (after the last
    norm) from which the teacher predicted each answer token: that of the token before it. argmax: [m] int32, the id
    that it predicted.
    """

    features: torch.Tensor
    finals: torch.Tensor
    argmax: torch.Tensor


class TeacherStore:
    """The rows of all sequences of a run.

    Args:
        directory: of the files.
        sequences: in the order in which they are stored.
        hidden_size: of the teacher.
    """

    def __init__(self, directory: Path, sequences: Sequence[Answer], hidden_size: int) -> None:
        self._tokens = [0, *accumulate(sequence.tokens for sequence in sequences)]
        self._answers = [0, *accumulate(len(sequence.response_ids) for sequence in sequences)]
        self._directory = directory
        self._hidden = hidden_size
        self._rows: TeacherRows | None = None

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return sum(self._sizes())

    @property
    def missing_bytes(self) -> int:
        """Not yet taken on disk."""
        present = sum(path.stat().st_blocks * 512 for path in self._paths() if path.is_file())
        return max(0, self.size_bytes - present)

    def make(self) -> None:
        """Take the files' place on the disk, so that no write to the maps can fail; what is there already stays.

        Raises:
            OSError: the disk is full.
        """
        for path, size in zip(self._paths(), self._sizes(), strict=True):
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, size)

    def open(self) -> None:
        """Map the files.

        Raises:
            TrainingError: one is not there, or of another size; mapping would make it, of zeros.
        """
        for path, size in zip(self._paths(), self._sizes(), strict=True):
            if not path.is_file() or path.stat().st_size != size:
                raise TrainingError(
                    f"{path}: expected a file of {size} bytes; delete {self._directory} to make it anew"
                )
        tokens, answers, width = self._tokens[-1], self._answers[-1], 3 * self._hidden
        features, finals, argmax = (str(path) for path in self._paths())
        self._rows = TeacherRows(
            torch.from_file(features, True, tokens * width, dtype=torch.bfloat16).view(tokens, width),
            torch.from_file(finals, True, answers * self._hidden, dtype=torch.bfloat16).view(answers, self._hidden),
            torch.from_file(argmax, True, answers, dtype=torch.int32),
        )

    def flush(self) -> None:
        """Return once everything written is on disk."""
        for path in self._paths():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def __getitem__(self, index: int) -> TeacherRows:
        """Views of one sequence's rows; writing to them writes to the files. The store must be open."""
        assert self._rows is not None
        tokens = slice(self._tokens[index], self._tokens[index + 1])
        answers = slice(self._answers[index], self._answers[index + 1])
        return TeacherRows(self._rows.features[tokens], self._rows.finals[answers], self._rows.argmax[answers])

    def all_argmax(self) -> torch.Tensor:
        """[answer tokens of all sequences] int32."""
        assert self._rows is not None
        return self._rows.argmax

    def _paths(self) -> list[Path]:
        return [self._directory / f"{name}.bin" for name in TeacherRows._fields]

    def _sizes(self) -> list[int]:
        """Bytes of each file."""
        bfloat16, int32 = torch.bfloat16.itemsize, torch.int32.itemsize
        tokens, answers = self._tokens[-1], self._answers[-1]
        return [tokens * 3 * self._hidden * bfloat16, answers * self._hidden * bfloat16, answers * int32]
