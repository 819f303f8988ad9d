"""One session's state machine: epochs, rounds and lengths around a drafter's own session.

Every check comes before the first change, so a refused message leaves the state as it was. One message at a time, on
the drafter's thread. It knows neither messages nor gRPC nor clocks, and nothing of how a tree is found.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.base import Budget, DraftSession
from draft_service.opening import Opening, check_budget, check_ids
from eagle_pangu.speculation.tree import TokenTree
from protos.errors import InvalidFieldError, StaleMessageError


class Question(NamedTuple):
    """A `propose` message: see ProposeTree for the rules that `Session.propose` holds it to."""

    round: int
    committed_length: int
    appended: Sequence[int]
    budget: Budget


class FeatureRows(NamedTuple):
    """Features of consecutive tokens: position of the first, and [count, feature_width] bits of bfloat16."""

    start: int
    bits: NDArray[np.uint16]


class Session:
    """A sequence, its drafter's memory of it, and the last round.

    Args:
        opening: validated already.
        draft: opened on the same prompt.
        reads_features: pass features on; otherwise they are checked and dropped.

    Attributes:
        opening: as given.
    """

    def __init__(self, opening: Opening, draft: DraftSession[Any, Any], *, reads_features: bool) -> None:
        self.opening = opening
        self._draft = draft
        self._reads_features = reads_features
        self._length = len(opening.prompt)
        self._features_end = 0
        self._last: tuple[Question, TokenTree] | None = None

    @property
    def round(self) -> int:
        """Number of the last round answered; 0 before the first."""
        return self._last[0].round if self._last else 0

    @property
    def length(self) -> int:
        """Tokens of the sequence: prompt and appended ones, the root included."""
        return self._length

    def check_epoch(self, epoch: int) -> None:
        """Raise StaleMessageError for a message of another epoch."""
        if epoch != self.opening.epoch:
            raise StaleMessageError("epoch", f"expected {self.opening.epoch}, got {epoch}")

    def read_features(self, features: FeatureRows) -> None:
        """Pass on those that did not come before.

        Raises:
            InvalidFieldError: a gap before the first one, or an end past the teacher's context limit.
        """
        self._check_features([features])
        self._pass_on(features)

    def advance(self) -> Generator[Any, Any, None]:
        """All pending work, in passes that may be shared."""
        return self._draft.advance()

    def propose(self, question: Question, features: Sequence[FeatureRows] = ()) -> Generator[Any, Any, TokenTree]:
        """The tree of a round; a repeat of the last round gets the same tree again.

        Rounds only have to ascend: one that the teacher ran without a draft is never heard of here.

        Args:
            question: of the round.
            features: that came with it; read first.

        Raises:
            StaleMessageError: the round is over, or the committed length is not the session's own.
            InvalidFieldError: anything else is wrong; names the field, and the token when it is one.
        """
        if self._last is not None and question.round == self._last[0].round:
            return self._repeat(question, *self._last)
        self._check(question)
        self._check_features(features)
        for rows in features:
            self._pass_on(rows)
        self._draft.extend(question.appended)
        self._length += len(question.appended)
        tree = yield from self._draft.propose(question.budget)
        self._last = (question, tree)
        return tree

    def _check_features(self, features: Iterable[FeatureRows]) -> None:
        known = self._features_end
        for start, bits in features:
            if start > known:
                raise InvalidFieldError("features.start", f"expected at most {known}, got {start}")
            end = start + len(bits)
            if end > self.opening.context_limit:
                limit = self.opening.context_limit
                raise InvalidFieldError("features.count", f"expected an end within {limit}, got {end}")
            known = max(known, end)

    def _pass_on(self, features: FeatureRows) -> None:
        end = features.start + len(features.bits)
        if end <= self._features_end:
            return
        if self._reads_features:
            self._draft.read_features(self._features_end, features.bits[self._features_end - features.start :])
        self._features_end = end

    def _repeat(self, question: Question, last: Question, tree: TokenTree) -> TokenTree:
        if question.committed_length != last.committed_length:
            raise StaleMessageError(
                "committed_length", f"expected {last.committed_length}, got {question.committed_length}"
            )
        if question != last:
            raise InvalidFieldError("appended_token_ids", f"expected the tokens and budget of round {last.round} again")
        return tree

    def _check(self, question: Question) -> None:
        if question.round == 0:
            raise InvalidFieldError("round", "expected 1 or more, got 0")
        if question.round < self.round:
            raise StaleMessageError("round", f"expected {self.round} or more, got {question.round}")
        if not question.appended:
            raise InvalidFieldError("appended_token_ids", "expected at least the root, got none")
        check_ids("appended_token_ids", question.appended, self.opening.vocab_size)
        check_budget("budget", question.budget, self.opening.max_budget)
        length = self._length + len(question.appended)
        if question.committed_length != length - 1:
            raise StaleMessageError("committed_length", f"expected {length - 1}, got {question.committed_length}")
        if length > self.opening.context_limit:
            raise InvalidFieldError(
                "appended_token_ids", f"expected a sequence within {self.opening.context_limit} tokens, got {length}"
            )
