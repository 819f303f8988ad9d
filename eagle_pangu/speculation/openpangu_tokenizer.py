"""The tokenizer of an openPangu directory, from its SentencePiece file and its tokenizer_config.json; no code is run.

The tokenizer class that comes with the weights cuts a text at its added tokens, hands every part to SentencePiece, and
puts the BOS in front. Of its settings it reads those that are read here; the others have no effect in it either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eagle_pangu.speculation.openpangu import OpenPanguError
from eagle_pangu.speculation.sentencepiece_bpe import AddedPiece, SentencePieceError, convert

FILE = "tokenizer.model"
TOKENIZER_CLASS = "PanguTokenizer"

_FIXED: dict[str, tuple[object, ...]] = {
    # What would change ids or text, with the values that leave them as they are converted.
    "add_eos_token": (False,),
    "clean_up_tokenization_spaces": (False,),
    "decode_with_prefix_space": (False,),
    "sp_model_kwargs": ({}, None),
    "tokenizer_class": (TOKENIZER_CLASS,),
}
_PLAIN = ("lstrip", "rstrip", "single_word", "normalized")


class OpenPanguTokenizer(NamedTuple):
    """tokenizers JSON, and whether a text made into ids begins with the BOS."""

    json: bytes
    adds_bos: bool


def convert_tokenizer(directory: Path, settings: Mapping[str, Any], bos_token_id: object) -> OpenPanguTokenizer:
    """Convert the tokenizer of an openPangu directory.

    Args:
        directory: holds tokenizer.model.
        settings: its tokenizer_config.json.
        bos_token_id: of its config.json; the model was trained on that id.

    Raises:
        OpenPanguError: the file is missing or cannot be converted exactly, or a setting is not supported.
    """
    file = directory / FILE
    if not file.is_file():
        raise OpenPanguError(f"expected {FILE}, the SentencePiece file of the tokenizer")
    for name, allowed in _FIXED.items():
        if name in settings and settings[name] not in allowed:
            raise OpenPanguError(f"tokenizer_config.json: {name}: expected {allowed[0]!r}, got {settings[name]!r}")
    adds_bos = settings.get("add_bos_token", True)  # what the tokenizer class takes for granted
    if not isinstance(adds_bos, bool):
        raise OpenPanguError(f"tokenizer_config.json: add_bos_token: expected true or false, got {adds_bos!r}")
    added = _added_pieces(settings)
    bos = next((piece for piece in added if piece.content == _content(settings.get("bos_token"))), None)
    if adds_bos and bos is None:
        raise OpenPanguError(
            f"tokenizer_config.json: bos_token: expected one of added_tokens_decoder, which add_bos_token needs, "
            f"got {settings.get('bos_token')!r}"
        )
    if bos and bos.id != bos_token_id:
        raise OpenPanguError(
            f"config.json: bos_token_id: expected {bos.id}, which is {bos.content!r}, bos_token of "
            f"tokenizer_config.json, got {bos_token_id!r}"
        )
    try:
        return OpenPanguTokenizer(convert(file.read_bytes(), added), adds_bos)
    except SentencePieceError as error:
        raise OpenPanguError(f"{FILE}: {error}") from error


def _added_pieces(settings: Mapping[str, Any]) -> list[AddedPiece]:
    """In id order. Special are the tokens that have a role: those that bracket a thought, say, are part of the text."""
    tokens, additional = settings.get("added_tokens_decoder", {}), settings.get("additional_special_tokens") or []
    if not isinstance(tokens, dict):
        raise OpenPanguError(f"tokenizer_config.json: added_tokens_decoder: expected an object, got {tokens!r}")
    if not isinstance(additional, list):
        raise OpenPanguError(f"tokenizer_config.json: additional_special_tokens: expected a list, got {additional!r}")
    roles = {_content(value) for name, value in settings.items() if name.endswith("_token")}
    roles |= set(map(_content, additional))
    pieces = []
    for key, token in tokens.items():
        content = _content(token)
        where = f"tokenizer_config.json: added_tokens_decoder: {key}"
        if not str(key).isdecimal() or not content:
            raise OpenPanguError(f"{where}: expected an id and its content, got {token!r}")
        if on := [name for name in _PLAIN if isinstance(token, dict) and token.get(name)]:
            raise OpenPanguError(f"{where}: {on[0]}: expected false, got {token[on[0]]!r}")
        pieces.append(AddedPiece(int(key), content, content in roles))
    if without := sorted(role for role in roles if role and role not in {piece.content for piece in pieces}):
        raise OpenPanguError(
            f"tokenizer_config.json: expected every token with a role in added_tokens_decoder, {without[0]!r} is not"
        )
    return sorted(pieces)


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
