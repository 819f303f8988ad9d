"""One session's state machine: chunked prefill, tree verification, two-phase commit.

`check` is pure and decides everything that a peer can get wrong, so a refused message leaves the state as it was;
`prefill`, `commit`, `verify` and `close` work on the KV and belong on the worker's thread. The first and the third are
generators that yield what they need computed, the session itself where that is a chunk of its prompt: others may share
the pass. One message at a time. It knows neither messages nor gRPC nor clocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.engine import Engine, ForwardResult
from eagle_pangu.speculation.indexing import index_tensor, select
from eagle_pangu.speculation.sampling import LogProbabilities, Sampler, logprobs
from eagle_pangu.speculation.segment import Segment, known_tokens
from protos.errors import InvalidFieldError, StaleMessageError
from teacher_service.opening import Limits, Opening
from teacher_service.passes import Passed, PassShare, Reading, Request
from teacher_service.prefix_cache import Prefix, PrefixCache
from teacher_service.replies import Chunk, FeatureRows, FirstToken, PromptLogprobs, Verdict
from teacher_service.round import Round, check_tree

_births = itertools.count()
T = TypeVar("T")
Steps: TypeAlias = Generator[Request, Passed, T]

PROMPT_LOGITS_BYTES = 2**26
"""Most bytes that the logits of a chunk may take, in float32, where those of every row are wanted."""


class Session:
    """A prompt, its slot, and the rounds on top of it.

    Args:
        engine: gives the slot.
        opening: validated already.
        limits: of the teacher.
        prefill_chunk: most prompt tokens of one forward pass.
        prefixes: what it may start from, and others from it.

    Attributes:
        committed_length: tokens whose KV is final.
        cached_tokens: those of them that another session had computed.
        share: in the last pass; None before the first.
    """

    def __init__(
        self, engine: Engine, opening: Opening, limits: Limits, prefill_chunk: int, prefixes: PrefixCache
    ) -> None:
        self.opening = opening
        self.committed_length = 0
        self.cached_tokens = 0
        self.share: PassShare | None = None
        self._engine = engine
        self._limits = limits
        self._chunk = prefill_chunk
        if opening.prompt_logprobs is not None:
            self._chunk = min(prefill_chunk, max(1, PROMPT_LOGITS_BYTES // (4 * limits.vocab_size)))
        self._prefixes = prefixes
        self._sampler = Sampler(opening.sampling, opening.prompt, opening.answer_start)
        self._slot: Slot | None = None
        self._born = next(_births)
        self._sound = True  # no pass has failed half-way
        self._reused: list[NDArray[np.uint16]] = []  # features of cached tokens, in at most one part, until sent
        self._features: list[NDArray[np.uint16]] = []  # of the committed tokens, where later sessions may need them
        self._decided: list[int] = []  # answer tokens that are pending: the next root is one of them
        self._last: Round | None = None
        self._verdict: Verdict | None = None

    @property
    def rounds(self) -> int:
        """Number of the last round answered; 0 before the first."""
        return self._last.number if self._last else 0

    def prefill(self, deliver: Callable[[Chunk], None]) -> Steps[None]:
        """Read and commit the prompt, chunk by chunk; the last one holds the first token.

        Args:
            deliver: told of every chunk as it comes.
        """
        while self.committed_length < len(self.opening.prompt):
            deliver((yield from self._read()))

    def waits_for(self, other: Reading) -> bool:
        """See `Reading`: it starts from what the other one reads, instead of reading the same beside it."""
        if self._slot is not None or not self._reuses or not isinstance(other, Session) or other._born >= self._born:
            return False
        wanted, read = self.opening, other.opening
        if wanted.want_features and not read.want_features:
            return False
        return self._prefixes.will_have_more(
            wanted.prompt, want_features=wanted.want_features, read=read.prompt, read_length=other.committed_length
        )

    def prepare(self) -> int:
        """See `Reading`: a slot, with what other sessions have computed of the prompt; rows of the next chunk."""
        if self._slot is None:
            self._start()
        return min(self._chunk, len(self.opening.prompt) - self.committed_length)

    def chunk(self, rows: int) -> Segment:
        """See `Reading`."""
        rows = min(rows, self.prepare())
        assert self._slot is not None
        start, every_row = self.committed_length, self.opening.prompt_logprobs is not None
        return known_tokens(
            self._slot,
            self.opening.prompt[start : start + rows],
            want_logits=every_row or start + rows == len(self.opening.prompt),
            want_features=self.opening.want_features,
            every_row=every_row,
        )

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
        check_tree(message.tree, self.opening, self._limits, committed_length, self._decided[message.commit])
        return None

    def commit(self, message: Round) -> None:
        """Make the root and the accepted rows that ``message`` keeps of the pending verdict final."""
        if self._verdict is None:
            return
        assert self._slot is not None
        assert self._last is not None
        with self._working():
            rows = self._verdict.accepted_rows[: message.commit]
            self._engine.commit(self._slot, rows)
            self._sampler.commit(self._last.tree.token_ids[[0, *rows]])
            self.committed_length += message.commit + 1
            if self._verdict.features is not None:
                self._record(self._verdict.features.bits[: message.commit + 1])

    def verify(self, message: Round) -> Steps[Verdict]:
        """One forward pass over the tree, and the walk along the tokens that the teacher decides."""
        assert self._slot is not None
        wanted = self.opening.want_features
        with self._working():
            result = yield from self._compute(Segment(self._slot, message.tree, want_features=wanted))
            assert result.logits is not None
            choices = self._sampler.decide(result.logits, message.tree)
            accepted = message.tree.accept(choices)
            path = [0, *accepted]
            choice = choices.of(path)
            self._decided = choice.token_ids.tolist()
            self._verdict = Verdict(
                message.number,
                accepted,
                self._decided[-1],
                choice.margins,
                FeatureRows(self.committed_length, _bits(result.features, path)) if wanted else None,
                self._logprobs(result.logits, path),
            )
            self._last = message
            return self._verdict

    def prefix(self) -> Prefix | None:
        """What later sessions may start from: all that is committed, unless a pass failed and left who knows what."""
        if self._slot is None or not self._sound or self.committed_length == 0:
            return None
        token_ids = self._sampler.committed[: self.committed_length]
        return Prefix(token_ids, self._slot, self._features if self.opening.want_features else None)

    def close(self) -> None:
        """Leave what is committed to later sessions, and let go of the slot. The session is of no use afterwards."""
        try:
            self._prefixes.leave(self)
        finally:
            self._slot = None

    @property
    def _reuses(self) -> bool:
        """Whether it may start from what others have computed: not where the logits of every row are needed."""
        return self.opening.prompt_logprobs is None

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Work on the KV: where it fails, nobody else starts from what is left."""
        try:
            yield
        except GeneratorExit:  # given up while it waited: nothing was computed
            raise
        except BaseException:
            self._sound = False
            raise

    def _compute(self, request: Request) -> Steps[ForwardResult]:
        passed = yield request
        self.share = passed.share
        return passed.result

    def _read(self) -> Steps[Chunk]:
        """The next chunk, as long as the pass had room for."""
        opening, begin = self.opening, self.committed_length
        with self._working():
            result = yield from self._compute(self)
            start = self.committed_length
            self.committed_length += result.rows
            features = None
            if opening.want_features:
                bits = np.concatenate([*self._reused, _bits(result.features)])
                self._reused.clear()
                self._record(bits)
                features = FeatureRows(begin, bits)
            done = self.committed_length == len(opening.prompt)
            first = self._decide_first(result.logits) if done else None
            return Chunk(features, self._prompt_logprobs(start, result.logits), first)

    def _start(self) -> None:
        slot = self._engine.open_slot(self.opening.capacity)
        reused = None
        if self._reuses:
            reused = self._prefixes.find(self.opening.prompt, want_features=self.opening.want_features)
        if reused is not None:
            slot.adopt(reused.kv, reused.length)
            self.committed_length = self.cached_tokens = reused.length
            if reused.features is not None:
                self._reused.append(reused.features)
        self._slot = slot
        self._prefixes.join(self)

    def _record(self, bits: NDArray[np.uint16]) -> None:
        if self._prefixes.enabled:
            self._features.append(bits)

    def _decide_first(self, logits: torch.Tensor | None) -> FirstToken:
        assert logits is not None
        choice = self._sampler.first(logits[-1:])
        self._decided = choice.token_ids.tolist()
        return FirstToken(self._decided[0], float(choice.margins[0]), self._logprobs(logits[-1:]))

    def _prompt_logprobs(self, start: int, logits: torch.Tensor | None) -> PromptLogprobs | None:
        """Of the tokens that follow the rows of a chunk at `start`, as far as they are prompt."""
        top = self.opening.prompt_logprobs
        if top is None:
            return None
        assert logits is not None
        following = self.opening.prompt[: self.opening.answer_start][start + 1 : start + 1 + len(logits)]
        if not len(following):
            return None
        return PromptLogprobs(start + 1, logprobs(logits[: len(following)], following, top))

    def _logprobs(self, logits: torch.Tensor, path: Sequence[int] = (0,)) -> LogProbabilities | None:
        """Of the tokens just decided, from the rows of `logits` that they were decided after."""
        top = self.opening.logprobs
        return None if top is None else logprobs(_rows(logits, path), self._decided, top)

    def _check_repeat(self, message: Round, last: Round) -> Verdict:
        if message.committed_length != last.committed_length:
            raise StaleMessageError(
                "committed_length", f"expected {last.committed_length}, got {message.committed_length}"
            )
        if not message.repeats(last):
            raise InvalidFieldError("tree", f"expected the tree and commit that round {last.number} was answered for")
        assert self._verdict is not None
        return self._verdict


def _rows(table: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """[n, ...] of a table with an entry a row."""
    return select(table, 0, index_tensor(rows, len(table), table.device, field="rows"))


def _bits(features: torch.Tensor | None, rows: list[int] | None = None) -> NDArray[np.uint16]:
    """Of the given rows of [rows, feature_width] bfloat16, on the host."""
    assert features is not None
    assert features.dtype == torch.bfloat16
    chosen = features if rows is None else _rows(features, rows)
    bits: NDArray[np.int16] = chosen.contiguous().view(torch.int16).cpu().numpy()
    return bits.view(np.uint16)
