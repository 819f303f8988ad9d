"""What a training run is asked for, and which of it each stage depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FeatureNorm = Literal["none", "each"]

OnProgress = Callable[[int, int, str], None]
"""(done, total, what): a stage tells how far it is after each piece of work that would survive a kill."""


class TrainingError(Exception):
    """The run cannot be made or go on; the message is for the user and names the argument, file or field."""


@dataclass(frozen=True)
class TrainingSettings:
    """One run.

    Attributes:
        teacher: transformers directory.
        output: folder of all that the run makes.
        prompts: prompt file for the teacher to answer; None where `answers` is given.
        answers: answers made before, .jsonl or .jsonl.gz; None where `prompts` is given.
        max_new_tokens: most tokens of an answer.
        draft_vocab: ids that the head can propose.
        max_tokens: most tokens, prompts included, whose features are kept on disk.
        steps_ahead: steps of the training-time test (K): how many tokens ahead the head learns to go on its own output.
        epochs: passes over the training part.
        first_step_epochs: how many of them, at the beginning, learn step 0 alone; one costs a third of a whole one.
        lr: highest learning rate.
        batch_tokens: tokens, prompts included, of one optimiser step; a longer sequence is a batch of its own.
        seed: of the answers' sampling, the held-out part, the order of the data and the random weights.
        feature_norm: RMS norm of each of the three hidden states before they are joined ("each"), or "none".
        autocast: compute the head in bfloat16; weights, norms and losses stay float32.
        dtype: of the teacher: "auto", "float32", "bfloat16" or "float16".
        device: by name.
        threads: CPU threads; 0: all cores.
        checkpoint_every: optimiser steps between two checkpoints.
    """

    teacher: Path
    output: Path
    prompts: Path | None = None
    answers: Path | None = None
    max_new_tokens: int = 256
    draft_vocab: int = 8192
    max_tokens: int = 1_000_000
    steps_ahead: int = 4
    epochs: int = 3
    first_step_epochs: int = 0
    lr: float = 1e-3
    batch_tokens: int = 512
    seed: int = 0
    feature_norm: FeatureNorm = "each"
    autocast: bool = False
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 0
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.answers is None):
            raise TrainingError("expected either --prompts or --answers")
        for name in ("max_new_tokens", "draft_vocab", "max_tokens", "steps_ahead", "epochs", "batch_tokens"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("checkpoint_every", self.checkpoint_every >= 1, "at least 1")
        self._require("lr", self.lr > 0, "more than 0")
        self._require("seed", self.seed >= 0, "at least 0")
        self._require("first_step_epochs", 0 <= self.first_step_epochs < self.epochs, f"0 to {self.epochs - 1}")
        self._require("feature_norm", self.feature_norm in ("none", "each"), "none or each")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise TrainingError(f"--{name.replace('_', '-')}: expected {expected}, got {getattr(self, name)}")

    def arguments(self, dtype: str) -> dict[str, dict[str, Any]]:
        """What each stage's files depend on beyond the stages before it: flag to value, files by their content.

        Args:
            dtype: the teacher's, with "auto" resolved.
        """
        asked: dict[str, Any] = {"--teacher": _digest(_model_files(self.teacher))}
        if self.answers is not None:
            asked["--answers"] = _digest([self.answers])
        if self.prompts is not None:
            asked["--prompts"] = _digest([self.prompts])
            asked.update({"--max-new-tokens": self.max_new_tokens, "--dtype": dtype, "--seed": self.seed})
        return {
            "answers": asked,
            "vocabulary": {"--draft-vocab": self.draft_vocab, "--max-tokens": self.max_tokens, "--seed": self.seed},
            "features": {"--dtype": dtype},
            "training": {
                "--steps-ahead": self.steps_ahead,
                "--epochs": self.epochs,
                "--first-step-epochs": self.first_step_epochs,
                "--lr": self.lr,
                "--batch-tokens": self.batch_tokens,
                "--feature-norm": self.feature_norm,
                "--autocast": self.autocast,
            },
            "rehearsal": {},
        }


def _model_files(directory: Path) -> Iterator[Path]:
    """What decides a teacher's tokens: its configuration, tokenizer, template and weights."""
    for file in sorted(directory.iterdir()):
        if file.suffix in (".json", ".jinja", ".safetensors", ".bin") and file.name != "source.json":
            yield file


def _digest(files: Iterator[Path] | list[Path]) -> str:
    """The first 16 digits of a SHA-256 over the files' content.

    Raises:
        TrainingError: one cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise TrainingError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]
