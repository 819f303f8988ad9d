"""What a model directory must hold beyond what transformers asks for: readable weights, sizes, and ids that fit.

Knows files, configurations and ids, not what a model computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_SIZES_OF_SOME = ("num_key_value_heads", "intermediate_size", "head_dim")  # not every architecture has them


class UnfitError(ValueError):
    """A model directory that cannot serve; the text names the file and the field."""


def check_weight_files(directory: Path) -> None:
    """Every safetensors file is whole: the header can be read, and the file is as long as that says.

    Raises:
        UnfitError: names the file.
    """
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as error:
            raise UnfitError(
                f"{file.name}: expected a whole safetensors file: {error}; a broken download? {file.stat().st_size} "
                "bytes are there"
            ) from error


def check_given_sizes(document: Mapping[str, Any]) -> None:
    """The sizes that a config.json gives, before transformers computes with them.

    Raises:
        UnfitError: names the one that is out of its range.
    """
    for name in (*_SIZES, *_SIZES_OF_SOME):
        if document.get(name) is not None:
            _check_size(name, document[name])


def check_sizes(config: Any) -> None:
    """The sizes of a transformers configuration, those that it takes for granted among them.

    Raises:
        UnfitError: names the one that is missing or out of its range.
    """
    sizes: dict[str, Any] = {name: getattr(config, name, None) for name in _SIZES}
    sizes |= {name: value for name in _SIZES_OF_SOME if (value := getattr(config, name, None)) is not None}
    for name, size in sizes.items():
        _check_size(name, size)
    heads, kv_heads = sizes["num_attention_heads"], sizes.get("num_key_value_heads", 1)
    if heads % kv_heads:
        raise UnfitError(
            f"config.json: num_key_value_heads: expected a divisor of {heads} attention heads, got {kv_heads}"
        )


def _check_size(name: str, size: object) -> None:
    if not is_whole(size, at_least=1):
        raise UnfitError(f"config.json: {name}: expected a whole number >= 1, got {size!r}")


def check_eos(place: str, eos: Any) -> tuple[int, ...]:
    """The ids of an eos_token_id, ascending.

    Args:
        place: the file that it is from.
        eos: an id, or a list of ids.

    Raises:
        UnfitError: it is neither.
    """
    ids = eos if isinstance(eos, list) else [eos]
    if not ids or not all(map(is_whole, ids)):
        raise UnfitError(f"{place}: eos_token_id: expected an id, or a list of ids, got {eos!r}")
    return tuple(sorted(set(ids)))


def check_vocabulary(config: Any, known: int, eos: Sequence[int]) -> None:
    """Every id of the tokenizer has a row of the embedding, and every id that ends an answer is the tokenizer's.

    Args:
        config: of transformers.
        known: one past the highest id that the tokenizer can read.
        eos: ids that end an answer.

    Raises:
        UnfitError: names the field.
    """
    if config.vocab_size < known:
        raise UnfitError(
            f"config.json: vocab_size: expected at least the {known} ids of the tokenizer, got {config.vocab_size}"
        )
    if beyond := [token for token in eos if token >= known]:
        raise UnfitError(
            f"eos_token_id: expected ids below {known}, which the tokenizer can read, got {beyond[0]}: an answer would "
            "never end"
        )


def is_whole(value: object, at_least: int = 0) -> bool:
    """Whether it is an integer of at least that, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
