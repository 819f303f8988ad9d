"""Ids to text as they come: each piece final, whole characters only, at a constant cost a token.

A token may hold a part of a character, and a decoder may treat the first token of a text apart (leading spaces), so a
token's text is what it adds to the text of a short window of tokens before it. It knows no stop rules.
"""

from __future__ import annotations

import codecs
import re

from orchestrator.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHARACTER_BYTES = 4
"""A character has at most so many bytes, hence at most so many tokens that make text."""
LONGEST_WINDOW = 4 * CHARACTER_BYTES

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Text of one answer.

    The pieces that `push` returns, then that of `finish`, make the text of all ids together (special tokens left out),
    but for a character cut through at the very end, which is dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were returned already
        self._held = 0  # tokens at the end of the window whose text was held back

    def push(self, token_id: int) -> str:
        """The text that became final with this id; empty while a character lacks bytes."""
        if token_id in self._tokenizer.special_ids or self._tokenizer.token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        self._held += 1
        final = text.rstrip(REPLACEMENT)
        if self._held >= CHARACTER_BYTES and len(final) < len(text):
            # After so many tokens only the last mark can stand for a character to come; the others are no characters.
            final = text[:-1]
        piece = final[self._given :]
        if piece:
            self._given = len(final)
            self._held = 0 if final == text else 1
        if len(self._window) >= (LONGEST_WINDOW if final == text else 2 * LONGEST_WINDOW):
            self._shorten(len(text) - self._given)
        return piece

    def finish(self) -> str:
        """What is left at the end. Call once; nothing may follow."""
        piece = self._tokenizer.decode(self._window)[self._given :]
        tail = [self._tokenizer.token(token_id) or "" for token_id in self._window[-CHARACTER_BYTES:]]
        if not _ends_inside_character(tail):
            return piece
        # One mark stands for the missing character, but a run of single-byte tokens is marked byte by byte.
        return piece.rstrip(REPLACEMENT) if _BYTE_TOKEN.fullmatch(tail[-1]) else piece[:-1]

    def _shorten(self, open_characters: int) -> None:
        """Keep the last few tokens, from the beginning of a character where there is one.

        Args:
            open_characters: at the end of the window's text, not yet returned.
        """
        for size in range(CHARACTER_BYTES, 2 * CHARACTER_BYTES):
            window = self._window[-size:]
            text = self._tokenizer.decode(window)
            if not text.startswith(REPLACEMENT):
                break
        self._window = window
        self._given = len(text) - open_characters


def _ends_inside_character(tokens: list[str]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(_token_bytes, tokens)))
    return bool(decoder.getstate()[0])


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """The bytes behind a vocabulary entry, in either of the ways in which vocabularies write parts of characters."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()
