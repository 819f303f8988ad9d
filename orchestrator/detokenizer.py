"""Ids to text as they come: each piece final, whole characters only, at a constant cost a token.

A token may hold a part of a character, and a decoder may treat the first token of a text apart (leading spaces), so a
token's text is what it adds to the text of a short window of tokens before it. It knows no stop rules.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from orchestrator.token_bytes import BYTE_TOKEN, REPLACEMENT
from orchestrator.tokenizer import Tokenizer

CHARACTER_BYTES = 4
"""A character has at most so many bytes, hence at most so many tokens that make text."""
LONGEST_WINDOW = 4 * CHARACTER_BYTES


class Detokenizer:
    """Text of one answer.

    The pieces that `push` returns, then that of `finish`, make the text of all ids together (special tokens left out),
    but for a character cut through at the very end, which is dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were returned already

    def push(self, token_id: int) -> str:
        """The text that became final with this id; empty while a character lacks bytes."""
        if not _has_text(self._tokenizer, token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        marks = _open_marks(self._tokenizer, self._window)
        final = text[: len(text) - marks]
        piece = final[self._given :]
        if piece:
            self._given = len(final)
        if len(self._window) >= (2 * LONGEST_WINDOW if marks else LONGEST_WINDOW):
            self._shorten(len(text) - self._given)
        return piece

    def finish(self) -> str:
        """What is left at the end. Call once; nothing may follow."""
        return _without_cut_character(self._tokenizer, self._window)[self._given :]

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


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of ids all at once, as a `Detokenizer` gives it piece by piece."""
    return _without_cut_character(tokenizer, [each for each in token_ids if _has_text(tokenizer, each)])


def _has_text(tokenizer: Tokenizer, token_id: int) -> bool:
    return token_id not in tokenizer.special_ids and tokenizer.token(token_id) is not None


def _without_cut_character(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of ids, but for a character cut through at the very end."""
    text = tokenizer.decode(token_ids)
    return text[: len(text) - _open_marks(tokenizer, token_ids)]


def _open_marks(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """At the end of the text of ids, the marks that stand for a character of which bytes may still come."""
    tail = token_ids[-CHARACTER_BYTES:]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(tokenizer.token_bytes.of, tail)))
    begun = decoder.getstate()[0]
    if not begun:
        return 0
    # Single-byte tokens are marked byte by byte; else one mark stands for the whole character.
    return len(begun) if BYTE_TOKEN.fullmatch(tokenizer.token(tail[-1]) or "") else 1
