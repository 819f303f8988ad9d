"""The bytes behind a vocabulary entry: the part of a text that a token stands for, whole characters or not.

Vocabularies write bytes in two ways: byte-level ones each byte as one printable character, the others text as it is,
with a mark for the space and, where a character has no entry, `<0xNN>` for a byte. The tokenizer's decoder tells which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from protos.v1 import sampling_pb2

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The mark for bytes that make no character."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies with byte fallback write a byte."""


class TokenBytes:
    """Bytes by id, worked out once each.

    Args:
        tokenizer: its vocabulary, its added tokens and its decoder are read.

    Attributes:
        byte_fallback: a byte without an entry is written `<0xNN>`.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        steps = [] if tokenizer.decoder is None else list(_steps(json.loads(tokenizer.decoder.__getstate__())))
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        self._replacements = [pair for step in steps for pair in _replacements(step)]
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The token's own text, special tokens included; empty for an id without an entry."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def fill(self, token_ids: Iterable[int], entries: Sequence[sampling_pb2.TokenLogprobs]) -> None:
        """Write the bytes into log-probabilities.

        Args:
            token_ids: those that the entries are of.
            entries: as many.
        """
        for token_id, entry in zip(token_ids, entries, strict=True):
            entry.token = self.of(token_id)
            entry.top_tokens[:] = map(self.of, entry.top_token_ids)

    def _work_out(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for mark, text in self._replacements:
            token = token.replace(mark, text)
        return token.encode()


def with_marks(tokens: Iterable[str]) -> Iterator[str]:
    """Tokens of a vocabulary with byte fallback, those bytes that are part of no character as marks, one each.

    The library's decoder would mark every byte of a run in which one is amiss, whole characters included.
    """
    for is_byte, run in groupby(tokens, key=lambda token: BYTE_TOKEN.fullmatch(token) is not None):
        if not is_byte:
            yield from run
            continue
        written = list(run)
        # Each byte that is part of no character becomes a surrogate of its own.
        characters = bytes(int(token[3:5], 16) for token in written).decode("utf-8", "surrogateescape")
        place = 0
        for character in characters:
            if "\udc80" <= character <= "\udcff":
                yield REPLACEMENT
                place += 1
            else:
                length = len(character.encode())
                yield from written[place : place + length]
                place += length


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A decoder's steps in order, out of sequences however deep."""
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    else:
        yield decoder


def _replacements(step: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a step puts in place of what, wherever it stands in a token."""
    if step["type"] == "Metaspace":
        yield step["replacement"], " "
    elif step["type"] == "Replace" and "String" in step["pattern"]:
        yield step["pattern"]["String"], step["content"]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTES = _byte_alphabet()
