"""Log-probabilities in OpenAI's two forms: that of chat, and the older one of completions.

A token's text is its bytes as UTF-8 with U+FFFD where they are only a part of a character, as OpenAI does; chat gives
the bytes too.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from protos.v1 import sampling_pb2

LEAST = -9999.0
"""What OpenAI writes for a probability of 0; JSON has no infinity."""


class Candidate(NamedTuple):
    """One token and its log-probability; None: nothing came before it."""

    token: bytes
    logprob: float | None

    @property
    def text(self) -> str:
        """See the module."""
        return self.token.decode(errors="replace")


class Place(NamedTuple):
    """The token that stands at one place, and the best ones there, best first."""

    chosen: Candidate
    best: Sequence[Candidate] = ()


def places_of(entries: Iterable[sampling_pb2.TokenLogprobs]) -> list[Place]:
    """The same as plain values."""
    return [
        Place(
            Candidate(entry.token, max(entry.logprob, LEAST)),
            [
                Candidate(token, max(logprob, LEAST))
                for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True)
            ],
        )
        for entry in entries
    ]


def prompt_places(tokens: Sequence[bytes], entries: Sequence[sampling_pb2.TokenLogprobs]) -> list[Place]:
    """Those of a prompt, whose first token has no log-probability and no entry.

    Args:
        tokens: the text of each.
        entries: of the tokens from the second on.
    """
    return [Place(Candidate(tokens[0], None)), *places_of(entries)]


def chat_logprobs(places: Iterable[Place]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = [
        {**_described(place.chosen), "top_logprobs": [_described(each) for each in place.best]} for place in places
    ]
    return {"content": content, "refusal": None}


def _described(candidate: Candidate) -> dict[str, Any]:
    return {"token": candidate.text, "logprob": candidate.logprob, "bytes": list(candidate.token)}


class CompletionLogprobs:
    """`choices[].logprobs` of one completion, whole or part by part.

    `text_offset` counts characters of the tokens' own text; a character spread over several tokens counts where it is
    complete.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def part(self, places: Sequence[Place]) -> dict[str, Any]:
        """Of the places that follow those given before."""
        return {
            "tokens": [place.chosen.text for place in places],
            "token_logprobs": [place.chosen.logprob for place in places],
            "top_logprobs": [_by_text(place) for place in places],
            "text_offset": [self._next_offset(place.chosen.token) for place in places],
        }

    def _next_offset(self, token: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(token))
        return offset


def _by_text(place: Place) -> dict[str, float | None] | None:
    """The best ones and the chosen one; of several with one text (parts of characters) the best."""
    if place.chosen.logprob is None:
        return None
    by_text: dict[str, float | None] = {}
    for candidate in (*place.best, place.chosen):
        by_text.setdefault(candidate.text, candidate.logprob)
    return by_text
