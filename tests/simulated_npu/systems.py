"""The same tiny teacher and drafts on the host and on the simulated npu, alone or as whole services."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.eagle3.formats import save_head
from eagle_pangu.speculation.engine import Engine
from teacher_service.main import build_engine
from tests.conformance.systems import System, draft_settings, system, teacher_settings
from tests.draft_service.heads import random_head
from tests.models import SHAPE, VOCAB_SIZE, tiny_model

FUSED = "npu_fused_infer_attention_score_v2"
CHUNK = 16
CAPACITY = 128


class Compute(NamedTuple):
    """Of a teacher. architecture: "llama", or "llama-bias" as openPangu's; the rest as its settings say."""

    architecture: str
    mode: str
    numerics: str
    dtype: str
    attention: str = "auto"

    @property
    def fields(self) -> dict[str, str]:
        """As settings."""
        return {name: value for name, value in self._asdict().items() if name != "architecture"}


def model_of(directory: Path, architecture: str) -> Path:
    """A random model of two layers, made once in the directory."""
    path = directory / architecture
    return path if path.is_dir() else tiny_model(path, architecture, num_hidden_layers=2)


def head_of(directory: Path) -> Path:
    """A random EAGLE-3 head for any of them, made once in the directory."""
    path, width = directory / "head", SHAPE["hidden_size"]
    if not path.is_dir():
        weights = random_head(
            hidden_size=width, target_hidden_size=width, head_dim=SHAPE["head_dim"], vocab_size=VOCAB_SIZE
        )
        save_head(weights, path, torch_dtype=torch.float32)
    return path


def engine_on(device: str, directory: Path, compute: Compute, **options: Any) -> Engine:
    """Not warm; prompts are read in chunks of `CHUNK`."""
    place = get_device(device)
    checkpoint = load_checkpoint(model_of(directory, compute.architecture), getattr(torch, compute.dtype), place)
    sizes = {"slot_capacity": CAPACITY, "max_rows": 16, "chunk": CHUNK}
    chosen = {"mode": compute.mode, "numerics": compute.numerics, "attention": compute.attention}
    return Engine(checkpoint, place, **{**sizes, **chosen, **options})


def services_on(device: str, directory: Path, compute: Compute) -> AbstractAsyncContextManager[System]:
    """Teacher, draft with every drafter and orchestrator in this process; both models on the device."""
    model = model_of(directory, compute.architecture)
    sizes = {"device": device, "slot_capacity": CAPACITY, "max_rows": 8, "max_depth": 4}
    teacher = teacher_settings(model, **sizes, slots=4, step_rows=32, prefill_chunk=CHUNK, **compute.fields)
    drafts = {"drafter": "standalone", "head": str(head_of(directory)), "embeddings": str(model)}
    draft = draft_settings(model, **sizes, **drafts, dtype=compute.dtype)
    return system(build_engine(teacher), draft, teacher)
