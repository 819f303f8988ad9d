"""Stage 4: optimiser steps over the stored rows, with checkpoints from which a killed run goes on as if never stopped.

Nothing random happens here but the order of the data, which is a function of seed and epoch; so head, optimiser and the
number of steps done are the whole state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draft_service.training.batches import Batch, load_batch
from draft_service.training.data import Corpus, epoch_batches
from draft_service.training.evaluation import acceptance, chain_tokens_per_round
from draft_service.training.initialisation import TeacherHead
from draft_service.training.settings import OnProgress, TrainingSettings
from draft_service.training.stages import replacing, write_text
from draft_service.training.store import TeacherStore
from draft_service.training.unroll import STEP_WEIGHT, distillation_loss, plan_steps, unroll
from eagle_pangu.speculation.eagle3.head import Eagle3Head, HeadConfig

CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
BETAS = (0.9, 0.95)
WARM_UP = 0.03  # of all steps
MOST_GRADIENT = 0.5


@dataclass(frozen=True)
class EpochMetrics:
    """A line of metrics.jsonl.

    epoch: passes over the data done; 0: before the first step. step: optimiser steps done. train_loss: mean over the
    epoch's optimiser steps, and over the steps of each unroll by their weights; None at epoch 0. acceptance,
    chain_tokens_per_round: see `evaluation`, on the held-out part.
    """

    epoch: int
    step: int
    train_loss: float | None
    acceptance: list[float]
    chain_tokens_per_round: float


class TrainingData(NamedTuple):
    """What the loop reads: sequences, the store of their rows (open), and the teacher's kept output layer."""

    corpus: Corpus
    store: TeacherStore
    teacher: TeacherHead


@dataclass
class _Progress:
    """How far the loop is: optimiser steps done, losses of the epoch at hand, and the epochs before."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    metrics: list[EpochMetrics] = field(default_factory=list)


class Trainer:
    """Trains a head.

    Args:
        head: as initialised, on its device; trained in place.
        data: on disk.
        settings: of the run.
        directory: of the stage.
        on_progress: in optimiser steps.
        on_epoch: told of every epoch's metrics.
    """

    def __init__(
        self,
        head: Eagle3Head,
        data: TrainingData,
        settings: TrainingSettings,
        directory: Path,
        on_progress: OnProgress,
        on_epoch: Callable[[EpochMetrics], None],
    ) -> None:
        self._head = head
        self._data = data
        self._settings = settings
        self._directory = directory
        self._on_progress = on_progress
        self._on_epoch = on_epoch
        self._device = head.fc.weight.device
        self._trained = {name: value for name, value in head.named_parameters() if value.requires_grad}
        self._optimiser = torch.optim.AdamW(self._trained.values(), lr=settings.lr, betas=BETAS, weight_decay=0.0)
        self._progress = _Progress()
        self._epochs = [
            self._batches(data.corpus.train, len(data.corpus.held_out), epoch) for epoch in range(settings.epochs)
        ]
        self._held_out = self._batches(data.corpus.held_out, 0, 0)

    def run(self) -> list[EpochMetrics]:
        """Train to the end, from the last checkpoint if there is one; the metrics of every epoch."""
        if not self._load():
            self._end_epoch(0)
        total = sum(map(len, self._epochs))
        end = 0
        for epoch, batches in enumerate(self._epochs, start=1):
            start, end = end, end + len(batches)
            steps = 1 if epoch <= self._settings.first_step_epochs else self._settings.steps_ahead
            for indices in batches[max(0, self._progress.step - start) :]:
                batch = load_batch(self._data.store, self._data.corpus.sequences, indices, self._device)
                self._step(batch, steps, rate(self._progress.step, total))
                if self._progress.step % self._settings.checkpoint_every == 0 and self._progress.step < end:
                    self._save()
                losses = self._progress.losses
                what = f"epoch {epoch} of {len(self._epochs)}, loss {sum(losses) / len(losses):.3f}"
                self._on_progress(self._progress.step, total, what)
            if len(self._progress.metrics) == epoch:
                self._end_epoch(epoch)
        return self._progress.metrics

    def _batches(self, sequences: Sequence[Any], offset: int, epoch: int) -> list[list[int]]:
        """Indices into the store, whose first sequence of these is number `offset`."""
        lengths = [sequence.tokens for sequence in sequences]
        asked = self._settings
        batches = epoch_batches(lengths, batch_tokens=asked.batch_tokens, seed=asked.seed, epoch=epoch)
        return [[offset + index for index in batch] for batch in batches]

    def _step(self, batch: Batch, steps: int, share: float) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.lr * share
        self._optimiser.zero_grad(set_to_none=True)
        targets = self._data.teacher.distributions(batch.finals)
        plan = plan_steps(batch.lengths, batch.prompts, steps, self._device)
        with self._autocast():
            outputs = unroll(self._head, batch.token_ids, batch.features, plan)
            loss = distillation_loss(self._head, outputs, plan, targets, self._data.teacher.holds(batch.argmax))
        if loss.requires_grad:  # else no row of the batch counts
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._trained.values(), MOST_GRADIENT)
            self._optimiser.step()
        self._progress.step += 1
        self._progress.losses.append(loss.item() / sum(STEP_WEIGHT**step for step in range(steps)))

    def _end_epoch(self, epoch: int) -> None:
        batches = (
            load_batch(self._data.store, self._data.corpus.sequences, indices, self._device)
            for indices in self._held_out
        )
        with self._autocast():
            accepted = acceptance(self._head, batches, self._settings.steps_ahead)
        losses = self._progress.losses
        metrics = EpochMetrics(
            epoch=epoch,
            step=self._progress.step,
            train_loss=sum(losses) / len(losses) if losses else None,
            acceptance=accepted,
            chain_tokens_per_round=chain_tokens_per_round(accepted),
        )
        self._progress.metrics.append(metrics)
        losses.clear()
        lines = [json.dumps(asdict(line)) + "\n" for line in self._progress.metrics]
        write_text(self._directory / METRICS, "".join(lines))
        self._save()
        self._on_epoch(metrics)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._settings.autocast)

    def _save(self) -> None:
        content = {
            "config": asdict(self._head.config),
            "target_ids": self._head.target_ids,
            "head": self._trained,
            "optimiser": self._optimiser.state_dict(),
            "progress": asdict(self._progress),
        }
        with replacing(self._directory / CHECKPOINT) as file:
            torch.save(content, file)

    def _load(self) -> bool:
        path = self._directory / CHECKPOINT
        if not path.is_file():
            return False
        content = torch.load(path, map_location=self._device, weights_only=True)
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(content["head"][name])
        self._optimiser.load_state_dict(content["optimiser"])
        progress = content["progress"]
        metrics = [EpochMetrics(**line) for line in progress["metrics"]]
        self._progress = _Progress(progress["step"], progress["losses"], metrics)
        return True


def load_trained(directory: Path) -> Eagle3Head:
    """The head of the stage's last checkpoint, on the CPU and without its embeddings, which are the teacher's."""
    content = torch.load(directory / CHECKPOINT, map_location="cpu", weights_only=True)
    head = Eagle3Head(HeadConfig(**content["config"]))
    head.load_state_dict({**content["head"], "target_ids": content["target_ids"]}, strict=False)
    return head


def rate(step: int, total: int) -> float:
    """Share of the highest learning rate at step 0 .. total - 1: a linear warm-up, then a cosine towards 0."""
    warm_up = max(1, round(WARM_UP * total))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (total - warm_up)))
