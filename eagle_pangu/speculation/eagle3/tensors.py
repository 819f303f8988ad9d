"""Weights of a stored head: the files they lie in, and the names they go by.

Producers agree on the tensors and differ in two spellings: the layer is `midlayer.` or `layers.0.`, and every name may
begin with `model.`. Here the first of each is used, as SafeAILab does. Which tensors a head has follows from its
configuration, so every one that is missing, left over or of another shape is an error: nothing is loaded in part.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eagle_pangu.speculation.eagle3.errors import HeadError
from eagle_pangu.speculation.eagle3.head import FEATURES, HeadConfig

SAFETENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"
EMBEDDINGS = "embed_tokens.weight"
_LAYER, _NUMBERED_LAYER = "midlayer.", "layers.0."
_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a head's directory, by its normal name, as it is stored.

    Raises:
        HeadError: no file of a known name, one that cannot be read, shards that do not match their index, or two
            tensors that go by the same name.
    """
    if (directory / SAFETENSORS).is_file():
        stored = _load_safetensors(directory / SAFETENSORS)
    elif (directory / _INDEX).is_file():
        stored = _load_shards(directory)
    elif (directory / _PICKLE).is_file():
        stored = _load_pickle(directory / _PICKLE)
    else:
        raise HeadError(f"expected {SAFETENSORS}, {_INDEX} or {_PICKLE}, found none")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        normal = name.removeprefix("model.")
        if normal.startswith(_NUMBERED_LAYER):
            normal = _LAYER + normal.removeprefix(_NUMBERED_LAYER)
        if normal in tensors:
            raise HeadError(f"{name}: expected one tensor of that meaning, found a second that is called {normal}")
        tensors[normal] = tensor
    return tensors


def module_names(config: HeadConfig) -> dict[str, str]:
    """Normal name of every weight of such a head -> its name in `Eagle3Head`."""
    own = ("fc", "norm", "lm_head", "embed_tokens")
    layer = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    norms = {"none": (), "whole": ("input_norm",), "each": tuple(f"fc_norm.{i}" for i in range(FEATURES))}
    names = {name: name for name in own}
    names |= {_LAYER + name: f"layer.{name}" for name in layer + mlp}
    names |= {f"{_LAYER}self_attn.{name}": f"layer.{name}" for name in attention}
    names |= {name: f"feature_norms.{index}" for index, name in enumerate(norms[config.feature_norm])}
    return {f"{name}.weight": f"{module}.weight" for name, module in names.items()}


def check_weights(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are not exactly those of `shapes`, by normal name."""
    missing, unexpected = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unexpected:
        raise HeadError(f"tensors do not match config.json: missing {missing}, unexpected {unexpected}")
    for name, shape in shapes.items():
        found = tensors[name]
        if found.shape != shape:
            raise HeadError(f"{name}: expected shape {list(shape)}, found {list(found.shape)}")
        if found.dtype not in _WEIGHTS:
            raise HeadError(f"{name}: expected floating point of 16 bits or more, found {found.dtype}")


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise HeadError(f"{path.name}: cannot be read: {error}") from error


def _load_shards(directory: Path) -> dict[str, torch.Tensor]:
    try:
        weight_map = json.loads((directory / _INDEX).read_text("utf-8"))["weight_map"]
        placed = {str(name): Path(file) for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise HeadError(f"{_INDEX}: expected a weight_map from tensor to file: {error!r}") from error
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(set(placed.values())):
        shard = _load_safetensors(directory / file)
        listed = {name for name, where in placed.items() if where == file}
        if wrong := sorted(listed ^ shard.keys()):
            raise HeadError(f"{file}: expected the tensors that {_INDEX} lists, found a difference in {wrong}")
        stored |= shard
    return stored


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise HeadError(f"{path.name}: cannot be read: {error}") from error
    if not isinstance(stored, dict) or not all(isinstance(value, torch.Tensor) for value in stored.values()):
        raise HeadError(f"{path.name}: expected a dictionary of tensors")
    return stored
