"""openPangu-Embedded 1B and 7B as the Llama that they are: Llama with biases on the q, k, v and o projections.

transformers has no class of that name, and the code that comes with the weights is never run. Other models come under
the same name with other layers, so whatever is not known here to leave the arithmetic alone is refused, not ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig

from eagle_pangu.speculation.checkpoint_checks import is_whole

MODEL_TYPE = "PanguEmbedded"
ARCHITECTURES = ["PanguEmbeddedForCausalLM"]

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_SCALES = ("rms_norm_eps", "rope_theta")
_SWITCHES = ("bias", "tie_word_embeddings")
_IDS = ("bos_token_id", "eos_token_id")
_REQUIRED = (*_COUNTS, *_SCALES, *_SWITCHES, *_IDS, "hidden_act", "architectures")

_WITHOUT_EFFECT = (
    "auto_map",  # names code, which is not run
    "attention_dropout",  # of training
    "initializer_range",
    "model_type",
    "torch_dtype",  # the dtype is a setting of ours
    "dtype",
    "transformers_version",
    "use_cache",
)
_KNOWN = frozenset((*_REQUIRED, *_WITHOUT_EFFECT, "head_dim", "pad_token_id"))

_FREQUENCIES = "rotary_emb.inv_freq"  # wherever it stands in a name, transformers drops the tensor without a word
_FREQUENCY_TOLERANCE = 2.0**-7  # relative; of values that were stored in bfloat16


class OpenPanguError(ValueError):
    """Not an openPangu-Embedded model as it is served here; the text names the key or the tensor."""


def llama_config(document: Mapping[str, Any]) -> LlamaConfig:
    """The Llama configuration that computes what an openPangu-Embedded config.json describes.

    Raises:
        OpenPanguError: a key is missing, unknown, or has a value out of its range.
    """
    if unknown := sorted(document.keys() - _KNOWN):
        raise OpenPanguError(
            f"config.json: unknown key {unknown[0]!r}: served are openPangu-Embedded 1B and 7B; other models of the "
            f"type {MODEL_TYPE} compute otherwise"
        )
    if missing := [name for name in _REQUIRED if name not in document]:
        raise OpenPanguError(f"config.json: {missing[0]}: expected a value, found none")
    _check(document, "architectures", document["architectures"] == ARCHITECTURES, repr(ARCHITECTURES))
    _check(document, "hidden_act", document["hidden_act"] == "silu", "'silu'")
    for name in _COUNTS:
        _check(document, name, is_whole(document[name], at_least=1), "a whole number >= 1")
    for name in _SCALES:
        value = document[name]
        _check(document, name, isinstance(value, int | float) and _is_positive(value), "a number > 0")
    for name in _SWITCHES:
        _check(document, name, isinstance(document[name], bool), "true or false")
    _check_ids(document)
    _check_heads(document)
    return LlamaConfig(
        **{name: document[name] for name in (*_COUNTS, *_IDS, "hidden_act", "rms_norm_eps", "tie_word_embeddings")},
        rope_parameters={"rope_type": "default", "rope_theta": float(document["rope_theta"])},
        head_dim=_head_dim(document),
        pad_token_id=document.get("pad_token_id"),
        attention_bias=document["bias"],
        mlp_bias=False,
    )


def check_dropped_tensors(directory: Path, config: LlamaConfig) -> None:
    """Prove that the tensors which loading leaves out say nothing new.

    The checkpoints carry the rotary frequencies, of each layer or once, which Llama derives from `rope_theta`.

    Raises:
        OpenPanguError: there are no safetensors files, or some frequencies are not those of `rope_theta`.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise OpenPanguError("expected the weights as *.safetensors, found none")
    theta, width = config.rope_parameters["rope_theta"], config.head_dim
    derived = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    expected = f"expected the {width // 2} frequencies of rope_theta {theta:g}, got others"
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in filter(lambda each: _FREQUENCIES in each, tensors.keys()):
                stored = tensors.get_tensor(name).double()
                same_shape = stored.shape == derived.shape
                if not same_shape or not torch.allclose(stored, derived, rtol=_FREQUENCY_TOLERANCE, atol=0):
                    raise OpenPanguError(f"{file.name}: {name}: {expected}")


def _check(document: Mapping[str, Any], name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise OpenPanguError(f"config.json: {name}: expected {expected}, got {document[name]!r}")


def _check_ids(document: Mapping[str, Any]) -> None:
    eos = document["eos_token_id"]
    ends = eos if isinstance(eos, list) else [eos]
    _check(document, "eos_token_id", bool(ends) and all(map(is_whole, ends)), "an id, or a list of ids")
    _check(document, "bos_token_id", is_whole(document["bos_token_id"]), "an id")
    if document.get("pad_token_id") is not None:
        within = is_whole(document["pad_token_id"]) and document["pad_token_id"] < document["vocab_size"]
        _check(document, "pad_token_id", within, "an id below vocab_size")


def _check_heads(document: Mapping[str, Any]) -> None:
    heads, kv_heads = document["num_attention_heads"], document["num_key_value_heads"]
    _check(document, "num_key_value_heads", heads % kv_heads == 0, f"a divisor of {heads} attention heads")
    _check(document, "hidden_size", document["hidden_size"] % heads == 0, f"a multiple of {heads} attention heads")
    width = _head_dim(document)
    name = "hidden_size" if document.get("head_dim") is None else "head_dim"
    _check(document, name, is_whole(width, at_least=2) and width % 2 == 0, "heads of an even width, which rotate")


def _head_dim(document: Mapping[str, Any]) -> Any:
    given = document.get("head_dim")
    return document["hidden_size"] // document["num_attention_heads"] if given is None else given


def _is_positive(value: float) -> bool:
    return not isinstance(value, bool) and 0 < value <= sys.float_info.max
