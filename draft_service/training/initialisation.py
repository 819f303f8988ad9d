"""The weights that a head begins with: the teacher's own, where it has them, so that little data goes far.

The head starts as the teacher's last layer and output layer, read from the highest of its features: what it says of the
token after next is poor at first, but in the teacher's words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from draft_service.training.settings import FeatureNorm, TrainingError
from eagle_pangu.speculation.checkpoints import Checkpoint
from eagle_pangu.speculation.eagle3.configurations import write_config
from eagle_pangu.speculation.eagle3.head import FEATURES, Eagle3Head, HeadConfig

RANDOM_STD = 0.02


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
        return torch.isin(target_ids, self.target_ids)


def teacher_head(checkpoint: Checkpoint, target_ids: torch.Tensor) -> TeacherHead:
    """The kept rows of the output layer of a teacher whose weights are still its own."""
    layer: Any = checkpoint.model.get_output_embeddings()
    return TeacherHead(target_ids, layer.weight[target_ids].float())


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


def initial_head(
    checkpoint: Checkpoint, output: TeacherHead, feature_norm: FeatureNorm, *, high_rms: float, seed: int
) -> Eagle3Head:
    """A head in float32 with frozen embeddings.

    `fc` passes the highest features on. Embedding, output layer and its norm, and all of the layer that has the same
    shape in the teacher's last layer, are the teacher's; the halves of q, k and v that read the embedding, and what has
    no counterpart, are small and random.

    Args:
        checkpoint: the teacher, its weights its own.
        output: its output layer over the draft vocabulary.
        feature_norm: variant of the head.
        high_rms: root mean square of the highest features. Behind a norm they have that of 1, so what the layer adds to
            them is divided by it: the proportion is then as in the teacher.
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
        head.norm.weight.copy_(model.base_model.norm.weight)
        head.fc.weight.zero_()
        head.fc.weight[:, (FEATURES - 1) * hidden :] = torch.eye(hidden)
        _copy_layer(head.layer, model.base_model.layers[-1])
        if feature_norm == "each":
            head.layer.o_proj.weight.div_(high_rms)
            head.layer.mlp.down_proj.weight.div_(high_rms)
    head.embed_tokens.requires_grad_(False)
    return head


def _copy_layer(layer: Any, teacher: Any) -> None:
    """What the teacher's layer has under the same name and in the same shape; biases have no place in a head."""
    attention = teacher.self_attn
    _copy(layer.hidden_norm, getattr(teacher, "input_layernorm", None))
    _copy(layer.post_attention_layernorm, getattr(teacher, "post_attention_layernorm", None))
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(layer.mlp, name), getattr(teacher.mlp, name, None))
    _copy(layer.o_proj, getattr(attention, "o_proj", None))
    if getattr(attention, "q_norm", None) is not None:
        return  # its queries and keys mean something only behind norms that a head does not have
    for name in ("q_proj", "k_proj", "v_proj"):
        own, other = getattr(layer, name), getattr(attention, name, None)
        if other is not None and other.weight.shape == (own.out_features, own.in_features // 2):
            own.weight[:, own.in_features // 2 :] = other.weight  # the embedding stands first


def _copy(own: Any, other: Any) -> None:
    weight = own.weight
    if other is not None and other.weight.shape == weight.shape:
        weight.copy_(other.weight)
