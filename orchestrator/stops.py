"""Where an answer ends: end-of-sequence ids, stop strings, the token limit. Pure: ids in, ids kept and text out.

Tokens are looked at one by one, so the result cannot depend on how they were grouped into rounds. It does not know
which of them were drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from orchestrator.detokenizer import Detokenizer


class End(NamedTuple):
    """Why the answer is over. matched_stop: the stop string that ended it; empty otherwise."""

    finish_reason: Literal["stop", "length"]
    matched_stop: str = ""


class Cut(NamedTuple):
    """What stays of a run of newly decided tokens.

    pieces: of each leading token that belongs to the answer, the text that became final with it; it may lag behind the
    tokens, and is complete at the end. end: None while the answer goes on (then every token is kept).
    """

    pieces: list[str]
    end: End | None

    @property
    def kept(self) -> int:
        """Leading tokens that belong to the answer."""
        return len(self.pieces)


class StopRules:
    """The rules of one request, in the order in which they hold at each token: end-of-sequence, stop string, length.

    Args:
        detokenizer: of this answer.
        end_token_ids: ids that end the answer, themselves kept but without text.
        max_tokens: most tokens of the answer; >= 1.
        stop: strings that end the answer before themselves, at the token that completes the first of them.
        include_stop: leave that string at the end of the text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        end_token_ids: Collection[int],
        max_tokens: int,
        stop: Sequence[str],
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._end_token_ids = frozenset(end_token_ids)
        self._include_stop = include_stop
        self._stop_strings = StopStrings(stop)
        self._left = max_tokens

    @property
    def left(self) -> int:
        """Tokens that may still follow."""
        return self._left

    def take(self, token_ids: Sequence[int]) -> Cut:
        """Append decided tokens up to the end of the answer. Not to be called after the end."""
        pieces: list[str] = []
        for token_id in token_ids:
            self._left -= 1
            ends = token_id in self._end_token_ids
            text = "" if ends else self._detokenizer.push(token_id)
            end = End("stop") if ends else End("length") if self._left == 0 else None
            if end is not None:
                text += self._detokenizer.finish()
            piece, matched = self._stop_strings.push(text)
            if matched is not None:
                end = End("stop", matched)
                if self._include_stop:
                    piece += matched
            elif end is not None:
                piece += self._stop_strings.finish()
            pieces.append(piece)
            if end is not None:
                return Cut(pieces, end)
        return Cut(pieces, None)


class Release(NamedTuple):
    """text: final now. matched: the stop string just completed, of which `text` holds nothing; None: none."""

    text: str
    matched: str | None


class StopStrings:
    """Finds the stop string that is completed first, and holds back text that may be the beginning of one.

    One Knuth-Morris-Pratt automaton a string. Of two completed by the same character the longer wins, so that the order
    of the request never matters.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._fallbacks = [_prefix_function(string) for string in self._stop]
        self._matched = [0] * len(self._stop)  # characters of each string that the text ends with
        self._held = ""

    def push(self, text: str) -> Release:
        """Add text; returns what cannot be a part of a stop string any more."""
        if not self._stop:
            return Release(text, None)
        self._held += text
        for at in range(len(self._held) - len(text), len(self._held)):
            completed = self._advance(self._held[at])
            if completed is not None:
                return Release(self._held[: at + 1 - len(completed)], completed)
        final = len(self._held) - max(self._matched)
        released, self._held = self._held[:final], self._held[final:]
        return Release(released, None)

    def finish(self) -> str:
        """The text held back, at the end of an answer that no stop string ended."""
        return self._held

    def _advance(self, character: str) -> str | None:
        completed = None
        for index, string in enumerate(self._stop):
            matched = self._matched[index]
            while matched and string[matched] != character:
                matched = self._fallbacks[index][matched - 1]
            if string[matched] == character:
                matched += 1
            if matched == len(string) and completed is None:
                completed = string
            self._matched[index] = matched
        return completed


def _prefix_function(string: str) -> list[int]:
    """[len(string)] for each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(string)
    for at in range(1, len(string)):
        length = table[at - 1]
        while length and string[at] != string[length]:
            length = table[length - 1]
        table[at] = length + 1 if string[at] == string[length] else 0
    return table
