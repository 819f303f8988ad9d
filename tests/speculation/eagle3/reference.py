"""A second EAGLE-3 head, written from the description of the architecture alone, row by row, in plain torch.

It shares no code with the package: no module of it, none of transformers. Weights go by SafeAILab's names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Facts:
    """How to read the weights."""

    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 16
    epsilon: float = 1e-5
    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None
    feature_norm: str = "none"
    norm_before_residual: bool = False
    recycles_normed: bool = False


def unroll(
    weights: Mapping[str, torch.Tensor], facts: Facts, features: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Draft logits of every row of a chain.

    Args:
        features: [known, 3 * target_hidden_size]: the first rows have the teacher's, later ones the head's own.
        token_ids: [rows] the token after the one that each row describes.

    Returns:
        [rows, draft_vocab_size].
    """
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    logits = []
    hidden = torch.empty(0)
    for position, token_id in enumerate(token_ids.tolist()):
        if position < len(features):
            hidden = weights["fc.weight"] @ _normed_features(weights, facts, features[position])
        embedded = weights["embed_tokens.weight"][token_id]
        output = _layer(weights, facts, embedded, hidden, position, keys, values)
        normed = _rms(output, weights["norm.weight"], facts)
        logits.append(weights["lm_head.weight"] @ normed)
        hidden = normed if facts.recycles_normed else output
    return torch.stack(logits)


def _layer(
    weights: Mapping[str, torch.Tensor],
    facts: Facts,
    embedded: torch.Tensor,
    hidden: torch.Tensor,
    position: int,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """One row; its key and value are appended to the lists."""

    def weight(name: str) -> torch.Tensor:
        return weights[f"midlayer.{name}.weight"]

    normed = _rms(hidden, weight("hidden_norm"), facts)
    joined = torch.cat([_rms(embedded, weight("input_layernorm"), facts), normed])
    query = _rotated((weight("self_attn.q_proj") @ joined).view(facts.heads, facts.head_dim), position, facts)
    key = (weight("self_attn.k_proj") @ joined).view(facts.key_value_heads, facts.head_dim)
    keys.append(_rotated(key, position, facts))
    values.append((weight("self_attn.v_proj") @ joined).view(facts.key_value_heads, facts.head_dim))
    attended = []
    for head in range(facts.heads):
        shared = head * facts.key_value_heads // facts.heads
        scores = torch.stack([key[shared] @ query[head] for key in keys]) / math.sqrt(facts.head_dim)
        attended.append(scores.softmax(0) @ torch.stack([value[shared] for value in values]))
    residual = (normed if facts.norm_before_residual else hidden) + weight("self_attn.o_proj") @ torch.cat(attended)
    inner = _rms(residual, weight("post_attention_layernorm"), facts)
    gate, up = weight("mlp.gate_proj") @ inner, weight("mlp.up_proj") @ inner
    return residual + weight("mlp.down_proj") @ (gate * torch.sigmoid(gate) * up)


def _normed_features(weights: Mapping[str, torch.Tensor], facts: Facts, features: torch.Tensor) -> torch.Tensor:
    if facts.feature_norm == "whole":
        return _rms(features, weights["input_norm.weight"], facts)
    if facts.feature_norm == "each":
        width = len(features) // 3
        chunks = [features[i * width : (i + 1) * width] for i in range(3)]
        return torch.cat([_rms(chunk, weights[f"fc_norm.{i}.weight"], facts) for i, chunk in enumerate(chunks)])
    return features


def _rms(values: torch.Tensor, weight: torch.Tensor, facts: Facts) -> torch.Tensor:
    return values / (values.square().mean() + facts.epsilon).sqrt() * weight


def _rotated(vectors: torch.Tensor, position: int, facts: Facts) -> torch.Tensor:
    """[heads, head_dim]: elements i and i + head_dim / 2 are a complex number, turned by position times frequency i."""
    half = facts.head_dim // 2
    angles = torch.tensor([position * _frequency(i, facts) for i in range(half)])
    turned = torch.complex(vectors[:, :half], vectors[:, half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def _frequency(index: int, facts: Facts) -> float:
    frequency = facts.theta ** (-2 * index / facts.head_dim)
    scaling = facts.scaling
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    # llama3: long waves are stretched, short ones kept, those between mixed.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return kept * frequency + (1 - kept) * frequency / scaling["factor"]
