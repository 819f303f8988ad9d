"""config.json of a stored head, as each producer writes it, and the shape and variant it means.

Three layouts:
    SafeAILab: a flat Llama configuration with `draft_vocab_size`.
    SpecForge: the same, with `fc_norm`, `norm_output` and `eagle_config` where a head has them.
    speculators (vLLM, RedHat): `speculators_model_type`, and the Llama configuration in `transformer_layer_config`.

Whatever no head here can have is refused by name. Tensors are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from eagle_pangu.speculation.eagle3.fields import Fields
from eagle_pangu.speculation.eagle3.head import FEATURES, HeadConfig
from eagle_pangu.speculation.eagle3.rope import parse_rope, rope_fields

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_PRODUCER = "speculators_model_type"


def parse_config(document: Mapping[str, Any]) -> HeadConfig:
    """The shape and variant that a config.json describes.

    Raises:
        HeadError: a field that is missing, of the wrong kind, contradicted, or of a head that is not supported.
    """
    head = Fields(document)
    speculators = head.has(_PRODUCER)
    layer = head.section("transformer_layer_config") if speculators else head
    _refuse_other_networks(head, layer)
    if speculators and not head.has("norm_before_residual"):
        # Its own default is false, vLLM's is true: no reading is safe.
        raise head.fault("norm_before_residual", "true or false")
    hidden, heads, vocabulary = layer.size("hidden_size"), layer.size("num_attention_heads"), layer.size("vocab_size")
    key_value_heads = layer.size("num_key_value_heads", heads)
    if heads % key_value_heads:
        raise layer.fault("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    if head.size("draft_vocab_size", vocabulary) > vocabulary:
        raise head.fault("draft_vocab_size", f"at most vocab_size, {vocabulary}")
    return HeadConfig(
        hidden_size=hidden,
        intermediate_size=layer.size("intermediate_size"),
        attention_heads=heads,
        key_value_heads=key_value_heads,
        head_dim=_head_dim(layer, hidden, heads),
        target_hidden_size=head.size("target_hidden_size", hidden),
        vocab_size=vocabulary,
        draft_vocab_size=head.size("draft_vocab_size", vocabulary),
        max_positions=layer.size("max_position_embeddings", HeadConfig.max_positions),
        rms_norm_eps=layer.number("rms_norm_eps"),
        feature_layers=_feature_layers(head),
        rope_parameters=parse_rope(layer),
        feature_norm=_feature_norm(head),
        norm_before_residual=_variant(head, "norm_before_residual"),
        recycles_normed=_variant(head, "norm_output"),
    )


def write_config(config: HeadConfig, torch_dtype: torch.dtype) -> dict[str, Any]:
    """config.json in SafeAILab's layout; variants that it has no field for, by the fields that other readers know.

    Raises:
        HeadError: a head that `parse_config` would refuse.
    """
    document: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": config.draft_vocab_size,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": str(torch_dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        **rope_fields(dict(config.rope_parameters)),
    }
    if config.target_hidden_size != config.hidden_size:
        # Its mere presence tells SafeAILab's loader that the teacher's embeddings do not fit.
        document["target_hidden_size"] = config.target_hidden_size
    variants = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm == "whole",
        "fc_norm": config.feature_norm == "each",
        "norm_output": config.recycles_normed,
    }
    document |= {name: True for name, present in variants.items() if present}
    if config.feature_layers is not None:
        # Readers know the one or the other place; the embedding is no layer's output.
        document[_LAYER_IDS] = list(config.feature_layers)
        nested = config.feature_layers if config.feature_norm == "whole" else _outputs(config.feature_layers)
        if nested[0] >= 0:
            document["eagle_config"] = {_LAYER_IDS: list(nested)}
    parse_config(document)
    return document


def _refuse_other_networks(head: Fields, layer: Fields) -> None:
    head.expect(_PRODUCER, "eagle3")
    head.expect("quantization_config")
    for fields in (head, head.section("eagle_config")):
        fields.expect("use_aux_hidden_state", True)
        fields.expect("num_aux_hidden_states", FEATURES)
        fields.expect("return_hidden_post_norm", False)
    layer.expect("model_type", "llama")
    layer.expect("num_hidden_layers", 1)
    layer.expect("layer_types", ["full_attention"])
    layer.expect("hidden_act", "silu")
    layer.expect("attention_bias", False)
    layer.expect("mlp_bias", False)


def _head_dim(layer: Fields, hidden: int, heads: int) -> int:
    if not layer.has("head_dim") and hidden % heads:
        raise layer.fault("head_dim", f"a size, since {heads} heads do not divide hidden_size, {hidden}")
    head_dim = layer.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise layer.fault("head_dim", "an even size")
    return head_dim


def _variant(head: Fields, name: str) -> bool:
    """A flag of the head, which some producers put into `eagle_config`, some at the top level, some into both."""
    nested = head.section("eagle_config")
    if head.has(name) and nested.has(name) and head.flag(name) != nested.flag(name):
        raise nested.fault(name, f"{head.flag(name)}, as the top level says")
    return head.flag(name) or nested.flag(name)


def _feature_norm(head: Fields) -> Literal["none", "whole", "each"]:
    whole, each = _variant(head, "norm_before_fc"), _variant(head, "fc_norm")
    if whole and each:
        raise head.fault("fc_norm", "false, since norm_before_fc is true")
    return "whole" if whole else "each" if each else "none"


def _feature_layers(head: Fields) -> tuple[int, int, int] | None:
    """The layers at whose entry features are taken, or None for the default.

    At the top level (speculators, vLLM) an id is the number of layers passed, which is the layer entered. In
    `eagle_config` it is the layer whose output is taken (SpecForge), one less; but heads with `norm_before_fc` state
    boundaries, numbers of layers passed, there too (ModelOpt).
    """
    nested = head.section("eagle_config")
    entries, stated = _ids(head), _ids(nested)
    if entries is not None:
        if stated not in (None, entries, _outputs(entries)):
            raise nested.fault(_LAYER_IDS, f"{list(_outputs(entries))}, the outputs of the entries at the top level")
        return entries
    if stated is None or _variant(head, "norm_before_fc"):
        return stated
    if stated[0] == 2:
        # The default is 1, ... as outputs and 2, ... as entries: this list may well be of the second kind.
        raise nested.fault(_LAYER_IDS, f"outputs from layer 1 on, or the entries as {_LAYER_IDS} at the top level")
    low, middle, high = stated
    return low + 1, middle + 1, high + 1


def _outputs(entries: tuple[int, int, int]) -> tuple[int, int, int]:
    """The layers whose outputs enter those layers."""
    low, middle, high = entries
    return low - 1, middle - 1, high - 1


def _ids(fields: Fields) -> tuple[int, int, int] | None:
    """Three ascending layer ids; none for a missing or an empty list."""
    ids = fields.values.get(_LAYER_IDS)
    if not ids and isinstance(ids, list | None):
        return None
    expected = f"{FEATURES} ascending layer ids"
    if not isinstance(ids, list) or len(ids) != FEATURES:
        raise fields.fault(_LAYER_IDS, expected)
    if any(not isinstance(layer_id, int) or isinstance(layer_id, bool) for layer_id in ids):
        raise fields.fault(_LAYER_IDS, expected)
    low, middle, high = ids
    if not 0 <= low < middle < high:
        raise fields.fault(_LAYER_IDS, expected)
    return low, middle, high
