"""A tiny random teacher, prompts for it, and runs that take seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draft_service.training.settings import TrainingSettings
from eagle_pangu.speculation.checkpoints import Checkpoint, load_checkpoint
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.eagle3.head import Eagle3Head, HeadConfig
from tests.models import VOCAB_SIZE, tiny_llama

CPU = torch.device("cpu")
TEACHER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "initializer_range": 0.3,
}
BIGRAM_WIDTH = 64
WALK = 40
"""Ids that the bigram teacher walks through."""


def toy_teacher(directory: Path, **changes: Any) -> Path:
    """A transformers directory."""
    return tiny_llama(directory, **{**TEACHER, **changes})


def bigram_teacher(directory: Path) -> Path:
    """A teacher that says `follower(token)` after each of `WALK` ids, whatever stands before it: easy to learn."""
    toy_teacher(directory, hidden_size=BIGRAM_WIDTH)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.randn(VOCAB_SIZE, BIGRAM_WIDTH, generator=torch.Generator().manual_seed(0))
        embeddings /= embeddings.norm(dim=-1, keepdim=True)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token in range(WALK):
            model.lm_head.weight[follower(token)] = embeddings[token]
    model.save_pretrained(directory)
    return directory


def follower(token: int) -> int:
    """The next id of the walk."""
    return (token + 7) % WALK


def write_walks(path: Path, count: int = 40, tokens: int = 24) -> Path:
    """Answers of that teacher, of the length of the prompt."""
    lines = []
    for number in range(count):
        ids = [number % WALK]
        while len(ids) < tokens:
            ids.append(follower(ids[-1]))
        half = tokens // 2
        line = {"id": f"w{number}", "greedy": True, "prompt_ids": ids[:half], "response_ids": ids[half:]}
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines))
    return path


def loaded(directory: Path) -> Checkpoint:
    """In float32 on the CPU."""
    return load_checkpoint(directory, torch.float32, get_device("cpu"))


def write_prompts(path: Path, count: int = 16) -> Path:
    """Single turns, and one conversation of two."""
    items = [{"id": f"p{number}", "source": "toy", "turns": [f"{number * 7919}?"]} for number in range(count)]
    items[3]["turns"] = ["first", "second"]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def toy_settings(folder: Path, **changes: Any) -> TrainingSettings:
    """A run over prompts in `folder`, teacher included; made there if missing."""
    teacher, prompts = folder / "teacher", folder / "prompts.jsonl"
    if not prompts.exists():
        toy_teacher(teacher)
        write_prompts(prompts)
    settings = TrainingSettings(
        teacher=teacher,
        output=folder / "output",
        prompts=prompts,
        max_new_tokens=12,
        draft_vocab=64,
        steps_ahead=3,
        epochs=2,
        batch_tokens=128,
        checkpoint_every=2,
        dtype="float32",
        threads=1,
    )
    return replace(settings, **changes)


@cache
def random_head(feature_norm: str = "none", **changes: Any) -> Eagle3Head:
    """Every weight random, of a scale that lets each matter."""
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "attention_heads": 4,
        "key_value_heads": 2,
        "head_dim": 4,
        "target_hidden_size": 12,
        "vocab_size": 50,
        "draft_vocab_size": 20,
    }
    head = Eagle3Head(HeadConfig(**{**shape, "feature_norm": feature_norm, **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + (parameter.dim() == 1))
    head.target_ids.copy_(torch.arange(20) * 2 + 3)
    return head


class Quiet:
    """A `Screen` that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.said: list[str] = []
        self.told: list[tuple[str, int, int]] = []

    def begin(self, stage: str) -> None:
        self.stages.append(stage)

    def progress(self, done: int, total: int, what: str) -> None:
        self.told.append((self.stages[-1], done, total))

    def say(self, text: str) -> None:
        self.said.append(text)
