"""One session's state machine: chunked prefill, tree verification, two-phase commit.

`check` is pure and decides everything that a peer can get wrong, so a refused message leaves the state as it was;
`prefill_next`, `commit` and `verify` do model work and belong on the executor's thread. One message at a time. It
knows neither messages nor gRPC nor clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.sampling import LogProbabilities, Sampler, logprobs
from eagle_pangu.speculation.tree import TokenTree
from protos.errors import InvalidFieldError, StaleMessageError
from teacher_service.opening import Limits, Opening


class FeatureRows(NamedTuple):
    """Features of consecutive tokens: position of the first, and [count, feature_width] bits of bfloat16."""

    start: int
    bits: NDArray[np.uint16]


class FirstToken(NamedTuple):
    """What prefill decided: the first answer token, its top-2 margin, in logits, and log-probabilities when wanted."""

    token_id: int
    margin: float
    logprobs: LogProbabilities | None


class Chunk(NamedTuple):
    """One prefill step: features of its tokens when wanted, and after the last chunk the first answer token."""

    features: FeatureRows | None
    first_token: FirstToken | None


@dataclass(frozen=True, eq=False)
class Round:
    """A `verify` message: see VerifyTree for the rules that `Session.check` holds it to."""

    epoch: int
    number: int
    committed_length: int
    commit: int
    tree: TokenTree

    def repeats(self, other: Round) -> bool:
        """Same question: equal but for the drafter's scores, which decide nothing."""
        return (
            self.commit == other.commit
            and np.array_equal(self.tree.token_ids, other.tree.token_ids)
            and np.array_equal(self.tree.parents, other.tree.parents)
        )


class Verdict(NamedTuple):
    """The teacher's answer to a round.

    accepted_rows: in path order, root left out. next_token_id: the token after the last of them.
    margins: [accepted + 1] float32, in logits. features: of the root and the accepted rows, when wanted. logprobs: of
    the accepted tokens and the next one, when wanted.
    """

    round: int
    accepted_rows: list[int]
    next_token_id: int
    margins: NDArray[np.float32]
    features: FeatureRows | None
    logprobs: LogProbabilities | None


class Session:
    """A prompt, its slot, and the rounds on top of it.

    Args:
        engine: does the forward passes.
        opening: validated already.
        limits: of the teacher.
        prefill_chunk: prompt tokens of one forward pass.
    """

    def __init__(self, engine: Engine, opening: Opening, limits: Limits, prefill_chunk: int) -> None:
        self.opening = opening
        self.committed_length = 0
        self._engine = engine
        self._limits = limits
        self._prefill_chunk = prefill_chunk
        self._sampler = Sampler(opening.sampling, opening.prompt, opening.answer_start)
        self._slot: Slot | None = None
        self._decided: list[int] = []  # answer tokens that are pending: the next root is one of them
        self._last: Round | None = None
        self._verdict: Verdict | None = None

    @property
    def rounds(self) -> int:
        """Number of the last round answered; 0 before the first."""
        return self._last.number if self._last else 0

    def prefill_next(self) -> Chunk:
        """Read and commit the next chunk of the prompt; call until it returns a first token."""
        if self._slot is None:
            self._slot = self._engine.open_slot(self.opening.capacity)
        start = self.committed_length
        end = min(start + self._prefill_chunk, len(self.opening.prompt))
        last = end == len(self.opening.prompt)
        wanted = self.opening.want_features
        result = self._engine.prefill(
            self._slot, self.opening.prompt[start:end], want_logits=last, want_features=wanted
        )
        self.committed_length = end
        first = None
        if last:
            assert result.logits is not None
            logits = result.logits[-1:]
            choice = self._sampler.first(logits)
            self._decided = choice.token_ids.tolist()
            first = FirstToken(self._decided[0], float(choice.margins[0]), self._logprobs(logits))
        return Chunk(_feature_rows(start, result.features) if wanted else None, first)

    def check(self, message: Round) -> Verdict | None:
        """Decide what to do with a message: None to run it, or the stored verdict when it repeats the last round.

        Raises:
            StaleMessageError: epoch, round or committed length is not the session's own.
            InvalidFieldError: anything else is wrong; names the field, and the row when it is one row.
        """
        if message.epoch != self.opening.epoch:
            raise StaleMessageError("epoch", f"expected {self.opening.epoch}, got {message.epoch}")
        if message.number == 0:
            raise InvalidFieldError("round", "expected 1 or more, got 0")
        if self._last is not None and message.number == self._last.number:
            return self._check_repeat(message, self._last)
        if message.number != self.rounds + 1:
            repeat = f" (or {self.rounds} again)" if self.rounds else ""
            raise StaleMessageError("round", f"expected {self.rounds + 1}{repeat}, got {message.number}")
        most = len(self._decided) - 1
        if message.commit > most:
            raise InvalidFieldError("commit", f"expected at most {most} accepted rows, got {message.commit}")
        committed_length = self.committed_length + (message.commit + 1 if self.rounds else 0)
        if message.committed_length != committed_length:
            raise StaleMessageError("committed_length", f"expected {committed_length}, got {message.committed_length}")
        self._check_tree(message.tree, committed_length, self._decided[message.commit])
        return None

    def commit(self, message: Round) -> None:
        """Make the root and the accepted rows that ``message`` keeps of the pending verdict final."""
        if self._verdict is not None:
            assert self._slot is not None
            assert self._last is not None
            rows = self._verdict.accepted_rows[: message.commit]
            self._engine.commit(self._slot, rows)
            self._sampler.commit(self._last.tree.token_ids[[0, *rows]])
            self.committed_length += message.commit + 1

    def verify(self, message: Round) -> Verdict:
        """One forward pass over the tree, and the walk along the tokens that the teacher decides."""
        assert self._slot is not None
        wanted = self.opening.want_features
        result = self._engine.verify(self._slot, message.tree, want_features=wanted)
        assert result.logits is not None
        choice = self._sampler.decide(result.logits, message.tree)
        accepted = message.tree.accept(choice.token_ids)
        path = [0, *accepted]
        self._decided = choice.token_ids[path].tolist()
        features = _feature_rows(self.committed_length, result.features, path) if wanted else None
        self._verdict = Verdict(
            message.number,
            accepted,
            self._decided[-1],
            choice.margins[path],
            features,
            self._logprobs(result.logits, path),
        )
        self._last = message
        return self._verdict

    def close(self) -> None:
        """Let go of the slot; a pass that still runs keeps it to its end. The session is of no use afterwards."""
        self._slot = None

    def _logprobs(self, logits: torch.Tensor, path: Sequence[int] = (0,)) -> LogProbabilities | None:
        """Of the tokens just decided, from the rows of `logits` that they were decided after."""
        top = self.opening.logprobs
        return None if top is None else logprobs(logits[list(path)], self._decided, top)

    def _check_repeat(self, message: Round, last: Round) -> Verdict:
        if message.committed_length != last.committed_length:
            raise StaleMessageError(
                "committed_length", f"expected {last.committed_length}, got {message.committed_length}"
            )
        if not message.repeats(last):
            raise InvalidFieldError("tree", f"expected the tree and commit that round {last.number} was answered for")
        assert self._verdict is not None
        return self._verdict

    def _check_tree(self, tree: TokenTree, committed_length: int, root: int) -> None:
        tree.validate(
            vocab_size=self._limits.vocab_size, max_rows=self.opening.max_rows, max_depth=self.opening.max_depth
        )
        if tree.token_ids[0] != root:
            raise InvalidFieldError(
                "tree.token_ids", f"expected the token after the committed ones, {root}, got {tree.token_ids[0]}", 0
            )
        positions = committed_length + tree.depth
        for row in np.flatnonzero(positions >= self._limits.context_limit)[:1].tolist():
            raise InvalidFieldError(
                "tree.parents", f"expected a position below {self._limits.context_limit}, got {positions[row]}", row
            )
        room = self.opening.capacity - committed_length
        if tree.rows > room:
            opening = self.opening
            raise InvalidFieldError(
                "tree.token_ids",
                f"expected at most {room} rows, with {committed_length} tokens committed in a session opened for "
                f"{len(opening.prompt)} prompt tokens, {opening.max_new_tokens} new ones (open.max_new_tokens) and "
                f"{opening.max_rows} tree rows, got {tree.rows}",
                room,
            )


def _feature_rows(start: int, features: torch.Tensor | None, rows: list[int] | None = None) -> FeatureRows:
    """Bits of the given rows of [rows, feature_width] bfloat16, on the host."""
    assert features is not None
    assert features.dtype == torch.bfloat16
    chosen = features if rows is None else features[torch.tensor(rows, device=features.device)]
    bits: NDArray[np.int16] = chosen.contiguous().view(torch.int16).cpu().numpy()
    return FeatureRows(start, bits.view(np.uint16))
