"""The hybrid drafter: an EAGLE-3 head and the n-gram look-up of the same sequence, blended into one tree.

The look-up knows what the sequence repeats, the head what it has not said yet, and one does not read the other. A row
of the look-up costs no pass, so such rows go on where the head stopped, and stand alone where it has nothing to say
(features missing, context limit passed).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.base import Budget
from draft_service.drafters.eagle3 import Eagle3Drafter, Eagle3Session
from draft_service.drafters.growth import best_subtree
from draft_service.drafters.head_engine import HeadRequest, HeadResult
from draft_service.drafters.ngram import SUFFIX_TRUST, NgramIndex, merge
from eagle_pangu.speculation.tree import TokenTree

HEAD_TRUST = SUFFIX_TRUST**3
"""The head counts as one more match of the look-up, of a suffix of three tokens: a single match of two tokens stands
behind it, one of four before it. Chosen with the default head on its held-out answers, where the powers from 3 to 4 are
equal, 2 costs 2 % of the tokens of a round, and longer suffixes, more matches or another trust gain nothing."""


def blend(head: TokenTree, matches: TokenTree, trust: float) -> TokenTree:
    """One tree of the candidates of both; the same token under the same parent is one row.

    A row's probability is the mean of what the two give to its path, the head weighing `HEAD_TRUST` and the look-up
    the trust in all of its matches; a path that one of them does not hold has none there. Neither gives a row more than
    its parent, so the mean does not, and any best first part of the blend is closed under parents.

    Args:
        head: candidates, scores in nats.
        matches: candidates with the logarithm of their share of trust, under the same root.
        trust: in all matches together, > 0.
    """
    assert head.scores is not None
    assert matches.scores is not None
    token_ids, parents = head.token_ids.tolist(), head.parents.tolist()
    children = [dict(below) for below in head.children]
    rows = [0]  # of the blend, by row of `matches`
    for token_id, parent in zip(matches.token_ids[1:].tolist(), matches.parents[1:].tolist(), strict=True):
        row = children[rows[parent]].setdefault(token_id, len(token_ids))
        if row == len(token_ids):
            token_ids.append(token_id)
            parents.append(rows[parent])
            children.append({})
        rows.append(row)
    by_head, by_matches = np.full((2, len(token_ids)), -np.inf)
    by_head[: head.rows] = head.scores + np.log(HEAD_TRUST)
    by_matches[rows] = matches.scores + np.log(trust)
    scores = np.logaddexp(by_head, by_matches)
    scores -= scores[0]
    for row in range(1, len(scores)):  # rounding must not lift a row above its parent
        scores[row] = min(scores[row], scores[parents[row]])
    return TokenTree.build(token_ids, parents, scores)


class HybridSession:
    """One sequence of the hybrid drafter; see `DraftSession`.

    Args:
        head: opened on the same tokens.
        index: of the tokens.
        matches: most matches merged into one tree.
    """

    def __init__(self, head: Eagle3Session, index: NgramIndex, matches: int) -> None:
        self._head = head
        self._index = index
        self._matches = matches

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append decided tokens to both."""
        self._head.extend(token_ids)
        self._index.extend(token_ids)

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        """For the head."""
        self._head.read_features(start, features)

    def advance(self) -> Generator[HeadRequest, HeadResult, None]:
        """Only the head has work pending."""
        return self._head.advance()

    def propose(self, budget: Budget) -> Generator[HeadRequest, HeadResult, TokenTree]:
        """The best rows of the blend."""
        matches = self._index.matches(self._matches)
        trust = sum(SUFFIX_TRUST**match.length for match in matches)
        candidates = yield from self._head.candidates(budget, HEAD_TRUST / (HEAD_TRUST + trust))
        if matches:
            candidates = blend(candidates, merge(self._index.tokens, matches, budget.depth), trust)
        return best_subtree(candidates, budget.rows)

    def close(self) -> None:
        """Close the head's session."""
        self._head.close()


class HybridDrafter:
    """A head and prompt lookup side by side; see `Drafter`.

    Args:
        head: drafter of the head.
        shortest, longest: suffix lengths to look up, in tokens.
        matches: most matches merged into one tree.
    """

    name = "hybrid"
    needs_features = True
    context_limit = 0  # past the head's own, the look-up goes on

    def __init__(self, head: Eagle3Drafter, shortest: int, longest: int, matches: int) -> None:
        self._head = head
        self._shortest = shortest
        self._longest = longest
        self._matches = matches
        self.identity = head.identity
        self.shapes = head.shapes

    def open(self, prompt: Sequence[int], max_budget: Budget) -> HybridSession:
        """A session over the prompt, indexed at once."""
        index = NgramIndex(self._shortest, self._longest)
        index.extend(prompt)
        return HybridSession(self._head.open(prompt, max_budget), index, self._matches)

    def together(self, requests: Sequence[HeadRequest]) -> int:
        """As many as the head takes."""
        return self._head.together(requests)

    def compute(self, requests: Sequence[HeadRequest]) -> list[HeadResult]:
        """A pass of the head; rows of the look-up take none."""
        return self._head.compute(requests)
