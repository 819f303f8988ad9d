"""The EAGLE-3 draft network: one decoder layer that reads the teacher's features and its own last hidden state.

Row t of a sequence x pairs what is known of token t (the teacher's features, or the hidden state that the head itself
gave for the row before) with the embedding of x[t + 1], stands at position t and predicts x[t + 2]. How rows see each
other is the caller's: training unrolls with one rule, drafting grows a tree over cached KV with another. Weights come
from `formats`; trees, caches and drafters are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [batch, heads, rows, head_dim], key and value [batch, kv_heads, rows, head_dim], rotated) -> as query."""

FEATURES = 3
"""Hidden states of the teacher in one token's features: low, middle, high."""


def _plain_rope() -> Mapping[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class HeadConfig:
    """Shape and variant of a head.

    Attributes:
        hidden_size: width of the head; of the embeddings too.
        target_hidden_size: width of the teacher.
        vocab_size: ids of the teacher; rows of the embedding.
        draft_vocab_size: ids that the head can propose.
        feature_layers: layers of the teacher at whose entry features are taken, 0 the first; None: 2, L // 2, L - 3.
        rope_parameters: as in a transformers configuration.
        feature_norm: RMS norm before `fc`: none, one over the whole width, or one for each of the hidden states.
        norm_before_residual: the residual branches off after the norm of the hidden state, not before.
        recycles_normed: what the next step reads is the hidden state after the output norm, not before.
    """

    hidden_size: int
    intermediate_size: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    max_positions: int = 2048
    rms_norm_eps: float = 1e-5
    feature_layers: tuple[int, int, int] | None = None
    rope_parameters: Mapping[str, Any] = field(default_factory=_plain_rope)
    feature_norm: Literal["none", "whole", "each"] = "none"
    norm_before_residual: bool = False
    recycles_normed: bool = False

    @property
    def feature_width(self) -> int:
        """Values of one token's features."""
        return FEATURES * self.target_hidden_size

    def as_llama(self) -> LlamaConfig:
        """What transformers' modules need to know."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.attention_heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            vocab_size=self.vocab_size,
        )


class Eagle3Head(nn.Module):
    """The network. Parameters are uninitialised; `formats.load_head` or the trainer fills them in.

    Attributes:
        target_ids: [draft_vocab_size] int64 teacher id of each draft id, ascending (the wire formats' `d2t` plus rank).
    """

    target_ids: torch.Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, target = config.hidden_size, config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        widths = {"none": [], "whole": [FEATURES * target], "each": [target] * FEATURES}[config.feature_norm]
        self.feature_norms = nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps) for width in widths)
        self.fc = nn.Linear(FEATURES * target, hidden, bias=False)
        self.layer = _HeadLayer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The teacher's features as a hidden state: [..., 3 * target_hidden_size] -> [..., hidden_size]."""
        parts = features.chunk(max(1, len(self.feature_norms)), dim=-1)
        if self.feature_norms:
            parts = tuple(norm(part) for norm, part in zip(self.feature_norms, parts, strict=True))
        fused: torch.Tensor = self.fc(torch.cat(parts, dim=-1))
        return fused

    def step(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One pass of the layer.

        Args:
            token_ids: [batch, rows] int64; of row t, the token after the one that `hidden` describes.
            hidden: [batch, rows, hidden_size] from `fuse` or `recycled`.
            positions: [batch, rows] int64.
            attend: which rows see which.

        Returns:
            [batch, rows, hidden_size], before the output norm: for `logits` and `recycled`.
        """
        output: torch.Tensor = self.layer(self.embed_tokens(token_ids), hidden, positions, attend)
        return output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] of `step` -> [..., draft_vocab_size]."""
        logits: torch.Tensor = self.lm_head(self.norm(output))
        return logits

    def recycled(self, output: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] of `step` -> the hidden state that stands for the teacher's features in the next step."""
        if not self.config.recycles_normed:
            return output
        normed: torch.Tensor = self.norm(output)
        return normed


class _HeadLayer(nn.Module):
    """A Llama decoder layer whose attention reads the embedding and the hidden state side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self._head_dim = config.head_dim
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(hidden, epsilon)
        self.hidden_norm = LlamaRMSNorm(hidden, epsilon)
        self.q_proj = nn.Linear(2 * hidden, config.attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.attention_heads * config.head_dim, hidden, bias=False)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, epsilon)
        self.mlp = LlamaMLP(config.as_llama())
        self.rotary = LlamaRotaryEmbedding(config.as_llama())

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See `Eagle3Head.step`; `embedded`: [batch, rows, hidden_size]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        inputs = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(inputs, positions))
        attended = attend(query, key, value).transpose(1, 2).flatten(2)
        residual = residual + self.o_proj(attended)
        output: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output
