"""Tiny heads with random weights, laid out by hand as each producer lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

HIDDEN, TARGET, INTERMEDIATE = 32, 24, 48
HEADS, KEY_VALUE_HEADS, HEAD_DIM = 4, 2, 16
VOCAB, DRAFT_VOCAB = 60, 20
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

Tensors = dict[str, torch.Tensor]


class Layout(NamedTuple):
    """What a producer puts into a directory: config.json and the tensors of model.safetensors."""

    config: dict[str, Any]
    tensors: Tensors

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, directory / "model.safetensors")
        return directory


def random_weights(feature_norm: str = "none", target: int = HIDDEN, draft_vocab: int = DRAFT_VOCAB) -> Tensors:
    """Every weight of a head by SafeAILab's names, float32; embeddings too."""
    random = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * 1.5 / columns**0.5

    def norm(width: int) -> torch.Tensor:
        return 0.5 + torch.rand(width, generator=random)

    weights = {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random),
        "fc.weight": matrix(HIDDEN, 3 * target),
        "midlayer.hidden_norm.weight": norm(HIDDEN),
        "midlayer.input_layernorm.weight": norm(HIDDEN),
        "midlayer.post_attention_layernorm.weight": norm(HIDDEN),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KEY_VALUE_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KEY_VALUE_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(draft_vocab, HIDDEN),
    }
    if feature_norm == "whole":
        weights["input_norm.weight"] = norm(3 * target)
    if feature_norm == "each":
        weights |= {f"fc_norm.{index}.weight": norm(target) for index in range(3)}
    return weights


def embeddings() -> torch.Tensor:
    """[VOCAB, HIDDEN] of the imagined teacher."""
    return random_weights()["embed_tokens.weight"]


def target_ids() -> torch.Tensor:
    """[DRAFT_VOCAB] ascending ids of the teacher, with gaps."""
    random = torch.Generator().manual_seed(3)
    return torch.randperm(VOCAB, generator=random)[:DRAFT_VOCAB].sort().values


def d2t() -> torch.Tensor:
    return target_ids() - torch.arange(DRAFT_VOCAB)


def t2d() -> torch.Tensor:
    return torch.isin(torch.arange(VOCAB), target_ids())


def numbered(weights: Tensors) -> Tensors:
    """The layer spelled `layers.0.`."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}


def safeailab() -> Layout:
    """As the first public heads: the teacher's embeddings left out, no base named for the rotations."""
    weights = random_weights()
    del weights["embed_tokens.weight"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    return Layout(config, {**weights, "d2t": d2t(), "t2d": t2d()})


def specforge() -> Layout:
    """With every option that it has: norms of each feature, another width than the teacher's, EAGLE 3.1 recycling."""
    config = {
        **safeailab().config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "target_hidden_size": TARGET,
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {LAYER_IDS: [1, 3, 5]},
    }
    return Layout(config, {**random_weights("each", TARGET), "d2t": d2t(), "t2d": t2d()})


def speculators() -> Layout:
    """As RedHat's: the layer's configuration apart, the layer numbered."""
    layer = {name: safeailab().config[name] for name in SPECULATORS_LAYER}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "teacher"}},
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        LAYER_IDS: [2, 4, 6],
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **layer,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_theta": 500000.0,
        },
    }
    return Layout(config, {**numbered(random_weights()), "d2t": d2t(), "t2d": t2d()})


def modelopt() -> Layout:
    """As NVIDIA's: one norm over all features, boundaries for layers, no mask, the base inside `rope_scaling` too."""
    weights = numbered(random_weights("whole"))
    del weights["embed_tokens.weight"]
    config = {
        **safeailab().config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "mlp_bias": False,
        "rope_scaling": {"rope_type": "default", "rope_theta": 20000},
        "rope_theta": 20000,
        "norm_before_fc": True,
        "eagle_config": {
            LAYER_IDS: [3, 5, 7],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "parallel_draft_step": 1,
        },
    }
    return Layout(config, {**weights, "d2t": d2t()})


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SPECULATORS_LAYER = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "max_position_embeddings",
    "model_type",
    "rms_norm_eps",
    "vocab_size",
)
