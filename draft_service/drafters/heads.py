"""Loading the configured EAGLE-3 head, and holding it to the teacher that it is configured for.

Of the teacher's directory only the token embeddings, the tokenizer and the configuration are read, never the model. A
head that was made for other layers, widths or ids drafts nonsense in silence, so everything that can be compared is.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from draft_service.drafters.base import DrafterError, ModelIdentity
from draft_service.drafters.compute import configured_compute
from draft_service.drafters.eagle3 import Eagle3Drafter
from draft_service.drafters.head_engine import HeadEngine
from draft_service.pretrained import pretrained_heads
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.checkpoints import (
    CheckpointError,
    known_vocab_size,
    read_config,
    read_eos_token_ids,
    read_tokenizer,
)
from eagle_pangu.speculation.devices.base import AttentionError
from eagle_pangu.speculation.eagle3.formats import HeadError, load_head
from eagle_pangu.speculation.eagle3.head import HeadConfig
from eagle_pangu.speculation.features import feature_layers
from eagle_pangu.speculation.models import ModelError, resolve_model

EMBEDDING = "embed_tokens.weight"
"""How the name of a model's input embedding ends."""


class Teacher(NamedTuple):
    """What a head needs of its teacher.

    embeddings: [embedding rows, width], in the dtype of the file. hidden_size: width of its hidden states. layers:
    their number. Other fields as in `Checkpoint`.
    """

    name: str
    embeddings: torch.Tensor
    hidden_size: int
    layers: int
    tokenizer_sha256: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def load_eagle3(settings: DraftSettings) -> Eagle3Drafter:
    """Load the configured head, ready to draft.

    Raises:
        DrafterError: the head, its teacher or the device cannot be used, or head and teacher do not fit.
    """
    device, dtype = configured_compute(settings)
    try:
        teacher = read_teacher(resolve_model(settings.embeddings))
    except (CheckpointError, ModelError) as error:
        raise DrafterError(f"draft.embeddings: {error}") from error
    try:
        directory = _resolve_head(settings)
        head = load_head(directory, embeddings=teacher.embeddings, dtype=dtype)
    except (HeadError, ModelError) as error:
        raise DrafterError(f"draft.head: {error}") from error
    require_fit(directory, head.config, teacher)
    try:
        engine = HeadEngine(
            head,
            device.for_drafting() if settings.quantize else device,
            vocab_size=teacher.vocab_size,
            slot_capacity=settings.slot_capacity,
            window=settings.window,
            attention=settings.attention,
            check_indices=settings.check_indices,
        )
    except AttentionError as error:
        raise DrafterError(f"draft.attention: {error}") from error
    engine.warm_up(settings.branching)
    identity = ModelIdentity(
        f"{directory.name} for {teacher.name}",
        teacher.tokenizer_sha256,
        teacher.vocab_size,
        teacher.eos_token_ids,
        engine.feature_width,
    )
    return Eagle3Drafter(engine, identity, settings.branching)


def _resolve_head(settings: DraftSettings) -> Path:
    if settings.head:
        return resolve_model(settings.head)
    ours = pretrained_heads()
    if settings.embeddings not in ours:
        raise ModelError(
            f"expected a directory: with the project come heads for draft.embeddings {', '.join(ours) or 'nobody'}, "
            f"not for {settings.embeddings!r}"
        )
    return ours[settings.embeddings]


def read_teacher(directory: Path) -> Teacher:
    """Read what a head needs of a transformers directory.

    Raises:
        CheckpointError: it is not there, or cannot be read.
    """
    config, tokenizer = read_config(directory), read_tokenizer(directory)
    return Teacher(
        name=directory.name,
        embeddings=_read_embeddings(directory),
        hidden_size=int(config.hidden_size),
        layers=int(config.num_hidden_layers),
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=known_vocab_size(config, tokenizer),
        eos_token_ids=read_eos_token_ids(directory, config),
    )


def require_fit(directory: Path, head: HeadConfig, teacher: Teacher) -> None:
    """Refuse a head that was made for another teacher.

    Raises:
        DrafterError: names both settings and every field that differs.
    """
    tapped = feature_layers(teacher.layers)
    compared = {
        "feature layers": (head.feature_layers or tapped, tapped),
        "target_hidden_size": (head.target_hidden_size, teacher.hidden_size),
        "vocab_size": (head.vocab_size, len(teacher.embeddings)),
    }
    differences = [f"{name}: {ours} / {theirs}" for name, (ours, theirs) in compared.items() if ours != theirs]
    if differences:
        raise DrafterError(
            f"draft.head: {directory} does not fit draft.embeddings, {teacher.name!r} "
            f"(head / teacher): {'; '.join(differences)}"
        )


def _read_embeddings(directory: Path) -> torch.Tensor:
    files: dict[str, Path] = {}
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as tensors:
                files.update((name, path) for name in tensors.keys() if name.endswith(EMBEDDING))  # noqa: SIM118
        if len(files) != 1:
            raise CheckpointError(
                f"{directory}: expected one tensor named *{EMBEDDING} in *.safetensors, found {sorted(files)}"
            )
        [(name, path)] = files.items()
        with safe_open(path, framework="pt") as tensors:
            embeddings: torch.Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: embeddings cannot be read: {error}") from error
    if embeddings.dim() != 2:
        raise CheckpointError(f"{directory}: {name}: expected 2 dimensions, got {embeddings.dim()}")
    return embeddings
