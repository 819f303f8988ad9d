"""The stages of a run in their order: skipped where an earlier run finished them, gone on with where it stopped.

It knows files and their order; what a stage computes is in the stage's own module.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.base import Budget, DrafterError
from draft_service.drafters.registry import DRAFTERS
from draft_service.training.answering import AnsweringTeacher, answer_prompts
from draft_service.training.answers import read_answers, summary
from draft_service.training.card import model_card
from draft_service.training.data import Corpus, split
from draft_service.training.export import export
from draft_service.training.features import ReadingTeacher, has_begun, read_sequences, require_disk
from draft_service.training.initialisation import initial_head, require_trainable, teacher_head
from draft_service.training.loop import EpochMetrics, Trainer, TrainingData, load_trained
from draft_service.training.rehearsal import Round, figures, rehearse
from draft_service.training.settings import TrainingError, TrainingSettings
from draft_service.training.stages import only_run_in, open_stages, write_text
from draft_service.training.store import TeacherStore
from draft_service.training.vocabulary import choose_vocabulary, coverage, forced_ids
from eagle_pangu.evaluation.prompts import PromptFileError, load_prompts
from eagle_pangu.serving.settings import DraftSettings, OrchestratorSettings
from eagle_pangu.speculation.checkpoints import Checkpoint, CheckpointError, load_checkpoint, read_tokenizer
from eagle_pangu.speculation.devices import get_device, resolve_dtype
from eagle_pangu.speculation.eagle3.errors import HeadError
from eagle_pangu.speculation.eagle3.formats import save_head

ANSWERS = "answers.jsonl"
TARGET_IDS = "target_ids.json"
HEAD = "head"
LIMITS = ("vocab_size", "context_limit")  # of the teacher, which its answers keep


class Screen(Protocol):
    """Where a run says how far it is."""

    def begin(self, stage: str) -> None:
        """A stage starts."""
        ...

    def progress(self, done: int, total: int, what: str) -> None:
        """How far the stage is."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...


def run(settings: TrainingSettings, screen: Screen) -> Path:
    """Make the head; its directory.

    Raises:
        TrainingError: the run cannot be made or go on.
    """
    with only_run_in(settings.output):
        try:
            return _Run(settings, screen).run()
        except (CheckpointError, DrafterError, HeadError, PromptFileError, OSError) as error:
            raise TrainingError(str(error)) from error


class _Run:
    def __init__(self, settings: TrainingSettings, screen: Screen) -> None:
        self._settings = settings
        self._screen = screen
        try:
            self._device = get_device(settings.device)
        except (ValueError, RuntimeError) as error:
            raise TrainingError(f"--device: {error}") from error
        self._device.configure_threads(settings.threads)
        try:
            self._dtype = resolve_dtype(settings.dtype, self._device)
        except ValueError as error:
            raise TrainingError(f"--dtype: {error}") from error
        self._dtype_name = str(self._dtype).removeprefix("torch.")
        self._stages = open_stages(settings.output, settings.arguments(self._dtype_name))

    def run(self) -> Path:
        """All stages."""
        for name, make in self._work.items():
            stage = self._stages[name]
            self._screen.begin(name)
            if stage.results is None:
                stage.begin()
                stage.finish(make(stage.directory))
            else:
                self._screen.say(f"{name}: finished before, in {stage.directory}")
        self._screen.begin("export")
        directory = self._settings.output / HEAD
        records = {name: self._results(name) for name in self._work}
        card = model_card(self._settings, self._dtype_name, records)
        export(load_trained(self._stages["training"].directory), directory, card)
        return directory

    @property
    def _work(self) -> dict[str, Callable[[Path], dict[str, Any]]]:
        """Stages by name: the folder in, the results out."""
        return {
            "answers": self._make_answers,
            "vocabulary": self._make_vocabulary,
            "features": self._make_features,
            "training": self._train,
            "rehearsal": self._rehearse,
        }

    def _make_answers(self, directory: Path) -> dict[str, Any]:
        settings, path, identity = self._settings, directory / ANSWERS, self._identity()
        limits = {name: identity[name] for name in LIMITS}
        if settings.answers is not None:
            answers = read_answers(settings.answers, **limits)
            write_text(path, "".join(answer.to_line() for answer in answers))
        else:
            assert settings.prompts is not None
            items = load_prompts(settings.prompts)
            teacher = AnsweringTeacher(
                settings.teacher,
                dtype=self._dtype,
                device=self._device.torch_device,
                eos_token_ids=identity["eos_token_ids"],
                **limits,
            )
            answers = answer_prompts(
                path,
                items,
                teacher,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                on_progress=self._screen.progress,
            )
        return {"teacher": identity, **summary(answers)}

    def _make_vocabulary(self, directory: Path) -> dict[str, Any]:
        teacher, corpus = self._results("answers")["teacher"], self._corpus
        forced = forced_ids(teacher["eos_token_ids"], read_tokenizer(self._settings.teacher))
        counted = [answer.response_ids for answer in corpus.counted]
        size = self._settings.draft_vocab
        target_ids = choose_vocabulary(counted, forced, size=size, vocab_size=teacher["vocab_size"])
        covered = coverage([answer.response_ids for answer in corpus.held_out], target_ids)
        write_text(directory / TARGET_IDS, json.dumps(target_ids.tolist()) + "\n")
        self._screen.say(f"vocabulary: {size:,} ids cover {100 * covered:.1f} % of the held-out answer tokens")
        return {"size": size, "forced_ids": forced, "held_out_coverage": covered}

    def _make_features(self, directory: Path) -> dict[str, Any]:
        sequences, held_out = self._corpus.sequences, self._corpus.held_out
        checkpoint, store = self._load_teacher(), self._store
        self._screen.say(f"features: {store.size_bytes / 1e9:.2f} GB in {directory}")
        require_disk(store, directory)
        if not has_begun(directory):
            store.make()
        store.open()
        longest = max(sequence.tokens for sequence in sequences)
        teacher = ReadingTeacher(checkpoint, self._device, longest)
        read_sequences(directory, sequences, store, teacher, self._screen.progress)
        outside = ~np.isin(store.all_argmax().numpy(), self._target_ids)
        held_out_answers = sum(len(answer.response_ids) for answer in held_out)
        return {
            "held_out_sequences": len(held_out),
            "train_sequences": len(sequences) - len(held_out),
            "tokens": sum(sequence.tokens for sequence in sequences),
            "longest_sequence": longest,
            "argmax_outside": float(outside.mean()),
            "held_out_argmax_outside": float(outside[:held_out_answers].mean()),
        }

    def _train(self, directory: Path) -> dict[str, Any]:
        settings, checkpoint, store = self._settings, self._load_teacher(), self._store
        store.open()
        output = teacher_head(checkpoint, torch.from_numpy(self._target_ids).to(self._device.torch_device))
        head = initial_head(checkpoint, output, settings.feature_norm, seed=settings.seed).to(self._device.torch_device)
        data = TrainingData(self._corpus, store, output)
        trainer = Trainer(head, data, settings, directory, self._screen.progress, self._say_metrics)
        metrics = trainer.run()
        trained = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
        return {"steps": metrics[-1].step, "trained_parameters": trained, "metrics": [asdict(line) for line in metrics]}

    def _rehearse(self, directory: Path) -> dict[str, Any]:
        """Draft the greedy ones of the held-out answers with the head as it will be read from its file."""
        store, defaults = self._store, OrchestratorSettings()
        store.open()
        budget = Budget(defaults.rows, defaults.depth)
        asked = {name: getattr(self._settings, name) for name in ("device", "dtype", "threads")}
        settings = DraftSettings(head=str(directory / HEAD), embeddings=str(self._settings.teacher), **asked)
        save_head(load_trained(self._stages["training"].directory), directory / HEAD, torch_dtype=torch.bfloat16)
        drafters = [DRAFTERS[name](settings) for name in ("ngram", "eagle3", "hybrid")]
        chosen = [(index, answer) for index, answer in enumerate(self._corpus.held_out) if answer.greedy]
        rounds: dict[str, list[Round]] = {drafter.name: [] for drafter in drafters}
        for done, (index, answer) in enumerate(chosen, start=1):
            features = store[index].features.view(torch.int16).numpy().view(np.uint16)
            for drafter in drafters:
                rounds[drafter.name] += rehearse(drafter, answer, features, budget)
            self._screen.progress(done, len(chosen), "the held-out answers are drafted")
        found = figures(rounds)
        for name, rate in found["tokens_per_round"].items():
            self._screen.say(f"{name}: {rate:.2f} tokens per round on {len(chosen)} held-out answers")
        return {"answers": len(chosen), "rows": budget.rows, "depth": budget.depth, **found}

    def _say_metrics(self, metrics: EpochMetrics) -> None:
        shares = " ".join(f"{share:.3f}" for share in metrics.acceptance)
        loss = "" if metrics.train_loss is None else f", training loss {metrics.train_loss:.3f}"
        self._screen.say(
            f"epoch {metrics.epoch}: held-out acceptance by step {shares}, chain {metrics.chain_tokens_per_round:.2f} "
            f"tokens per round{loss}"
        )

    def _identity(self) -> dict[str, Any]:
        """What the records say of the teacher; a teacher that no head can be made for is refused here."""
        checkpoint = self._load_teacher()
        require_trainable(checkpoint, self._settings.draft_vocab, self._settings.feature_norm)
        return {
            "name": checkpoint.name,
            "tokenizer_sha256": checkpoint.tokenizer.sha256,
            "hidden_size": checkpoint.hidden_size,
            "eos_token_ids": checkpoint.eos_token_ids,
            "vocab_size": checkpoint.vocab_size,
            "context_limit": checkpoint.context_limit,
        }

    def _load_teacher(self) -> Checkpoint:
        """Anew for each stage: what computes with it gives its weights up."""
        return load_checkpoint(self._settings.teacher, self._dtype, self._device)

    def _results(self, name: str) -> dict[str, Any]:
        results = self._stages[name].results
        assert results is not None
        return results

    @cached_property
    def _corpus(self) -> Corpus:
        teacher = self._results("answers")["teacher"]
        limits = {name: teacher[name] for name in LIMITS}
        answers = read_answers(self._stages["answers"].directory / ANSWERS, **limits)
        return split(answers, max_tokens=self._settings.max_tokens, seed=self._settings.seed)

    @cached_property
    def _target_ids(self) -> NDArray[np.int64]:
        """[draft_vocab] ascending."""
        path = self._stages["vocabulary"].directory / TARGET_IDS
        return np.array(json.loads(path.read_text("utf-8")), dtype=np.int64)

    @cached_property
    def _store(self) -> TeacherStore:
        hidden_size = self._results("answers")["teacher"]["hidden_size"]
        return TeacherStore(self._stages["features"].directory, self._corpus.sequences, hidden_size)
