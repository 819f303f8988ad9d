"""The n-gram drafter, "prompt lookup": what followed the last few tokens before is proposed to follow them again.

Several matches are merged into one tree, so that the places where earlier continuations differ become branches. No
model and no torch: an index that grows with the sequence, and dictionary look-ups.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, Never

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.base import Budget
from draft_service.drafters.growth import best_subtree
from eagle_pangu.speculation.tree import TokenTree

# How much more a match is trusted for each further token of suffix, and how much less each further token of its
# continuation. Chosen on greedy answers of the default model, where values of 2 .. 16 and 0.5 .. 0.9 are within 1 %.
SUFFIX_TRUST = 4.0
CONTINUATION_TRUST = 0.8


class Match(NamedTuple):
    """An earlier place where the sequence read as it does at its end.

    position: of the token that followed there; length: of the suffix found, in tokens.
    """

    position: int
    length: int


class NgramIndex:
    """Where each n-gram of a growing sequence was followed by something.

    Args:
        shortest, longest: suffix lengths to look up, in tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens: list[int] = []
        self._longest_first = range(longest, shortest - 1, -1)
        self._followed: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens: constant time each. An n-gram enters the index once it is followed by a token."""
        for token_id in token_ids:
            position = len(self.tokens)
            for length in self._longest_first:
                if length <= position:
                    ngram = tuple(self.tokens[position - length : position])
                    self._followed.setdefault(ngram, []).append(position)
            self.tokens.append(token_id)

    def matches(self, limit: int) -> list[Match]:
        """At most `limit` matches of the sequence's end: longest suffix first, then most recent; each place once."""
        found: dict[int, Match] = {}
        for length in self._longest_first:
            suffix = tuple(self.tokens[-length:])
            for position in reversed(self._followed.get(suffix, ())):
                if len(found) == limit:
                    return list(found.values())
                found.setdefault(position, Match(position, length))
        return list(found.values())


def merge(tokens: Sequence[int], matches: Sequence[Match], depth: int) -> TokenTree:
    """The continuations of all matches as one tree under the last token, with scores.

    A node's score is the logarithm of the share of trust that runs through it: each match starts with
    ``SUFFIX_TRUST ** length`` and keeps ``CONTINUATION_TRUST`` of it at each further token.

    Args:
        tokens: the sequence.
        matches: in order of preference: rows are numbered in this order, which decides ties.
        depth: most tokens of one continuation.
    """
    token_ids, parents, trust = [tokens[-1]], [0], [0.0]
    children: list[dict[int, int]] = [{}]
    for match in matches:
        share = SUFFIX_TRUST**match.length
        trust[0] += share
        row = 0
        for token_id in tokens[match.position : match.position + depth]:
            share *= CONTINUATION_TRUST
            child = children[row].setdefault(token_id, len(token_ids))
            if child == len(token_ids):
                token_ids.append(token_id)
                parents.append(row)
                trust.append(0.0)
                children.append({})
            trust[child] += share
            row = child
    scores = np.log(np.array(trust) / trust[0]) if matches else np.zeros(1)
    return TokenTree.build(token_ids, parents, scores)


class NgramSession:
    """One sequence of the n-gram drafter; see `DraftSession`."""

    def __init__(self, index: NgramIndex, matches: int) -> None:
        self._index = index
        self._matches = matches

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the tokens."""
        self._index.extend(token_ids)

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        """Never called: needs_features is False."""

    def advance(self) -> Generator[Never, Never, None]:
        """Nothing is ever pending."""
        yield from ()

    def propose(self, budget: Budget) -> Generator[Never, Never, TokenTree]:
        """Look up the end of the sequence and merge what followed, without a pass; well under a millisecond."""
        yield from ()
        matches = self._index.matches(self._matches)
        return best_subtree(merge(self._index.tokens, matches, budget.depth), budget.rows)

    def close(self) -> None:
        """The garbage collector does the rest."""


class NgramDrafter:
    """Prompt lookup; see `Drafter`.

    Args:
        shortest, longest: suffix lengths to look up, in tokens.
        matches: most matches merged into one tree.
    """

    name = "ngram"
    needs_features = False
    context_limit = 0
    identity = None
    shapes = None

    def __init__(self, shortest: int, longest: int, matches: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._matches = matches

    def open(self, prompt: Sequence[int], max_budget: Budget) -> NgramSession:
        """A session over the prompt, indexed at once: a millisecond a thousand tokens."""
        index = NgramIndex(self._shortest, self._longest)
        index.extend(prompt)
        return NgramSession(index, self._matches)

    def together(self, requests: Sequence[Never]) -> int:
        """Never called."""
        return len(requests)

    def compute(self, requests: Sequence[Never]) -> Sequence[Never]:
        """Never called: no session asks for a pass."""
        return requests
