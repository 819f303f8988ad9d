"""The weights that a head begins with: the teacher's words at both ends, and nothing learned between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from draft_service.training.settings import FeatureNorm, TrainingError
from eagle_pangu.speculation.checkpoints import Checkpoint
from eagle_pangu.speculation.eagle3.configurations import write_config
from eagle_pangu.speculation.eagle3.head import FEATURES, Eagle3Head, HeadConfig
from eagle_pangu.speculation.indexing import select

RANDOM_STD = 0.02
OUTPUT_SCALE = 0.3
"""Of the first logits beside those that the teacher's output layer gives its own hidden states: unsure, not wrong."""


class TeacherHead(NamedTuple):
    """The teacher's output layer over a draft vocabulary.

    target_ids: [draft_vocab_size] int64, ascending. weight: [draft_vocab_size, hidden] float32.
    """

    target_ids: torch.Tensor
    weight: torch.Tensor

    def distributions(self, finals: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] after the last norm -> [rows, draft_vocab_size]: softmax renormalised over the vocabulary."""
        return (finals @ self.weight.T).softmax(dim=-1)

    def holds(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Which of the ids [rows] are in the vocabulary: [rows] bool."""
        # Not torch.isin, which indexes inside.
        places = torch.searchsorted(self.target_ids, target_ids).clamp(max=len(self.target_ids) - 1)
        return select(self.target_ids, 0, places) == target_ids


def teacher_head(checkpoint: Checkpoint, target_ids: torch.Tensor) -> TeacherHead:
    """The kept rows of the output layer of a teacher whose weights are still its own."""
    layer: Any = checkpoint.model.get_output_embeddings()
    return TeacherHead(target_ids, select(layer.weight, 0, target_ids).float())


def head_config(checkpoint: Checkpoint, draft_vocab: int, feature_norm: FeatureNorm) -> HeadConfig:
    """A head of the shape of one of the teacher's layers."""
    config: Any = checkpoint.model.config
    heads = int(config.num_attention_heads)
    return HeadConfig(
        hidden_size=checkpoint.hidden_size,
        intermediate_size=int(config.intermediate_size),
        attention_heads=heads,
        key_value_heads=int(config.num_key_value_heads),
        head_dim=int(getattr(config, "head_dim", None) or checkpoint.hidden_size // heads),
        target_hidden_size=checkpoint.hidden_size,
        vocab_size=int(config.vocab_size),
        draft_vocab_size=draft_vocab,
        max_positions=checkpoint.context_limit,
        rms_norm_eps=float(config.rms_norm_eps),
        rope_parameters=dict(config.rope_parameters),
        feature_norm=feature_norm,
    )


def require_trainable(checkpoint: Checkpoint, draft_vocab: int, feature_norm: FeatureNorm) -> None:
    """Check that a head for this teacher can be made and stored, before hours are spent on it.

    Raises:
        TrainingError, HeadError: it cannot; the text names the argument or the field.
    """
    layer: Any = checkpoint.model.get_output_embeddings()
    if layer.bias is not None:
        raise TrainingError("--teacher: lm_head.bias: expected an output layer without one")
    if draft_vocab > checkpoint.vocab_size:
        raise TrainingError(
            f"--draft-vocab: expected at most {checkpoint.vocab_size}, the ids of the teacher, got {draft_vocab}"
        )
    write_config(head_config(checkpoint, draft_vocab, feature_norm), torch.bfloat16)


def initial_head(checkpoint: Checkpoint, output: TeacherHead, feature_norm: FeatureNorm, *, seed: int) -> Eagle3Head:
    """A head in float32 with frozen embeddings.

    `fc` passes the highest features on. Embedding, output layer and its norm, that one scaled down, are the teacher's.
    The layer is random: a copy of the teacher's last one stays on a plateau for longer, since all it knows is to say
    the token that is decided already.

    Args:
        checkpoint: the teacher, its weights its own.
        output: its output layer over the draft vocabulary.
        feature_norm: variant of the head.
        seed: of the random part.
    """
    model: Any = checkpoint.model
    head = Eagle3Head(head_config(checkpoint, len(output.target_ids), feature_norm))
    hidden = head.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # norms
            elif parameter is not head.embed_tokens.weight:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * RANDOM_STD)
        head.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        head.target_ids.copy_(output.target_ids)
        head.lm_head.weight.copy_(output.weight)
        head.norm.weight.copy_(model.base_model.norm.weight * OUTPUT_SCALE)
        head.fc.weight.zero_()
        head.fc.weight[:, (FEATURES - 1) * hidden :] = torch.eye(hidden)
    head.embed_tokens.requires_grad_(False)
    return head
