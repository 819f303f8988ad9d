"""Fields of config.json that no head here can have, that contradict each other, or that leave two readings open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.speculation.eagle3.checkpoints import (
    LAYER_IDS,
    VOCAB,
    Layout,
    modelopt,
    safeailab,
    speculators,
)
from tests.speculation.eagle3.refusing import refusal_of

FIELDS: list[tuple[Callable[[], Layout], dict[str, Any], str, str]] = [
    # layout, fields, the one that is named, what is said of it
    (safeailab, {"hidden_act": "gelu"}, "hidden_act", "expected 'silu', found 'gelu'"),
    (safeailab, {"attention_bias": True}, "attention_bias", "expected False, found True"),
    (safeailab, {"mlp_bias": True}, "mlp_bias", "expected False, found True"),
    (safeailab, {"num_hidden_layers": 2}, "num_hidden_layers", "expected 1, found 2"),
    (safeailab, {"model_type": "qwen3"}, "model_type", "expected 'llama', found 'qwen3'"),
    (safeailab, {"layer_types": ["sliding_attention"]}, "layer_types", "found ['sliding_attention']"),
    (safeailab, {"quantization_config": {"bits": 4}}, "quantization_config", "expected none, found"),
    (safeailab, {"hidden_size": None}, "hidden_size", "expected a positive integer, found none"),
    (safeailab, {"intermediate_size": 48.5}, "intermediate_size", "found 48.5"),
    (safeailab, {"vocab_size": True}, "vocab_size", "found True"),
    (safeailab, {"num_attention_heads": 0}, "num_attention_heads", "found 0"),
    (safeailab, {"num_key_value_heads": 3}, "num_key_value_heads", "a divisor of num_attention_heads, 4"),
    (safeailab, {"head_dim": 15}, "head_dim", "expected an even size, found 15"),
    (safeailab, {"head_dim": None, "num_attention_heads": 6}, "head_dim", "6 heads do not divide hidden_size, 32"),
    (safeailab, {"rms_norm_eps": None}, "rms_norm_eps", "expected a positive number, found none"),
    (safeailab, {"rms_norm_eps": float("nan")}, "rms_norm_eps", "found nan"),
    (safeailab, {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size", f"at most vocab_size, {VOCAB}, found {VOCAB + 1}"),
    (safeailab, {"norm_before_residual": "yes"}, "norm_before_residual", "true or false, found 'yes'"),
    (safeailab, {"norm_output": 1}, "norm_output", "found 1"),
    (safeailab, {"fc_norm": True, "norm_before_fc": True}, "fc_norm", "false, since norm_before_fc is true"),
    (safeailab, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "expected 1.0, found 0.5"),
    (safeailab, {"rope_theta": "10000"}, "rope_theta", "expected a positive number, found '10000'"),
    (safeailab, {"rope_scaling": "linear"}, "rope_scaling", "expected an object, found 'linear'"),
    (safeailab, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type", "found 'dynamic'"),
    (safeailab, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type", "found 'longrope'"),
    (safeailab, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "a positive number, found none"),
    (safeailab, {"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor", "found -1"),
    (
        safeailab,
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        "rope_scaling.type",
        "expected 'linear', found 'yarn'",
    ),
    (
        safeailab,
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
        "rope_scaling.mrope_section",
        "no such field with rope type default",
    ),
    (
        safeailab,
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_parameters.rope_theta",
        "expected 1000000.0 as in rope_theta, found 10000.0",
    ),
    (
        safeailab,
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling",
        "what rope_parameters say",
    ),
    (safeailab, {LAYER_IDS: [1, 2]}, LAYER_IDS, "expected 3 ascending layer ids, found [1, 2]"),
    (safeailab, {LAYER_IDS: [1, 2, 3, 4]}, LAYER_IDS, "expected 3 ascending"),
    (safeailab, {LAYER_IDS: [4, 2, 6]}, LAYER_IDS, "expected 3 ascending"),
    (safeailab, {LAYER_IDS: [-1, 2, 6]}, LAYER_IDS, "expected 3 ascending"),
    (safeailab, {LAYER_IDS: [1, 2, "last"]}, LAYER_IDS, "expected 3 ascending"),
    (safeailab, {LAYER_IDS: 5}, LAYER_IDS, "expected 3 ascending"),
    (
        safeailab,
        {LAYER_IDS: [2, 4, 6], "eagle_config": {LAYER_IDS: [3, 5, 7]}},
        f"eagle_config.{LAYER_IDS}",
        "expected [1, 3, 5], the outputs of the entries at the top level, found [3, 5, 7]",
    ),
    (
        safeailab,
        {"eagle_config": {LAYER_IDS: [2, 4, 6]}},
        f"eagle_config.{LAYER_IDS}",
        "expected outputs from layer 1 on, or the entries",
    ),
    (modelopt, {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state", "found False"),
    (modelopt, {"eagle_config": {"num_aux_hidden_states": 4}}, "eagle_config.num_aux_hidden_states", "found 4"),
    (
        modelopt,
        {"eagle_config": {"return_hidden_post_norm": True}},
        "eagle_config.return_hidden_post_norm",
        "found True",
    ),
    (
        modelopt,
        {"eagle_config": {"norm_before_fc": False}},
        "eagle_config.norm_before_fc",
        "True, as the top level says,",
    ),
    (speculators, {"speculators_model_type": "peagle"}, "speculators_model_type", "expected 'eagle3', found 'peagle'"),
    (speculators, {"norm_before_residual": None}, "norm_before_residual", "true or false, found none"),
    (speculators, {"transformer_layer_config": None}, "transformer_layer_config.hidden_size", "found none"),
    (
        speculators,
        {"transformer_layer_config": {"model_type": "qwen3"}},
        "transformer_layer_config.model_type",
        "qwen3",
    ),
]


@pytest.mark.parametrize(("producer", "fields", "named", "said"), FIELDS, ids=[f"{f[2]}-{f[3]}" for f in FIELDS])
def test_a_field_is_refused_by_name(
    producer: Callable[[], Layout], fields: dict[str, Any], named: str, said: str, tmp_path: Path
) -> None:
    layout = producer()
    text = refusal_of(Layout({**layout.config, **fields}, layout.tensors), tmp_path)
    assert f"config.json: {named}: expected" in text
    assert said in text
