"""Sessions that decode greedily over an engine's slots, with trees that hold some of the true continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.engine import Engine, ForwardResult
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree
from teacher_service.batching import Batching, Computed
from tests.models import VOCAB_SIZE
from tests.speculation.engines import prompt

Ids = np.ndarray[Any, np.dtype[np.int64]]


def plain_decoding(engine: Engine, ids: Ids, tokens: int) -> list[int]:
    """The teacher's own greedy tokens, one a pass."""
    slot, decided, following = engine.open_slot(), [], ids
    for _ in range(tokens):
        logits = engine.prefill(slot, following, want_logits=True).logits
        assert logits is not None
        decided.append(int(logits[-1].argmax()))
        following = np.array(decided[-1:])
    return decided


class GreedySession:
    """One session of a batch, and its twin that is verified alone.

    Attributes:
        emitted: tokens decided so far; the last one is the next root.
        rounds: answered.
    """

    def __init__(self, engine: Engine, seed: int, length: int, tokens: int) -> None:
        self._engine = engine
        self.random = np.random.default_rng(seed)
        self.prompt = prompt(length, seed)
        self.expected = plain_decoding(engine, self.prompt, tokens + 6)
        self.slot, self._alone = engine.open_slot(), engine.open_slot()
        for slot in (self.slot, self._alone):
            engine.prefill(slot, self.prompt, want_logits=False)
        self.emitted = self.expected[:1]
        self.rounds = 0
        self.tokens = tokens

    @property
    def done(self) -> bool:
        return len(self.emitted) >= self.tokens

    def propose(self, *, depth: int | None = None, chain: bool = False) -> Segment:
        """The root, `depth` (random when not given) tokens of the true continuation, and wrong ones beside them, or in
        a chain perhaps behind them."""
        exact = depth is not None
        depth = int(self.random.integers(0, 5)) if depth is None else depth
        right = self.expected[len(self.emitted) : len(self.emitted) + depth]
        ids, parents, on_path = [self.emitted[-1]], [0], [0]
        for token in right:
            if not chain and self.random.random() < 0.6:  # before the right child: its path is not dense
                ids.append((token + 1 + int(self.random.integers(VOCAB_SIZE - 2))) % VOCAB_SIZE)
                parents.append(on_path[-1])
            ids.append(token)
            parents.append(on_path[-1])
            on_path.append(len(ids) - 1)
        if chain and not exact and self.random.random() < 0.5:
            wrong = (self.expected[len(self.emitted) + depth] + 1) % VOCAB_SIZE
            ids.append(wrong)
            parents.append(on_path[-1])
        self.tree = TokenTree.build(ids, parents)
        return Segment(self.slot, self.tree)

    def take(self, result: ForwardResult) -> None:
        """Compare with the twin, accept, commit both."""
        assert result.logits is not None
        alone = self._engine.verify(self._alone, self.tree).logits
        torch.testing.assert_close(result.logits, alone, atol=1e-4, rtol=1e-4)
        decided = result.logits.argmax(dim=-1).tolist()
        path = self.tree.accept(decided)
        for slot in (self.slot, self._alone):
            self._engine.commit(slot, path)
        self.emitted += [decided[row] for row in [0, *path]]
        self.rounds += 1

    def check(self) -> None:
        assert self.emitted == self.expected[: len(self.emitted)]


class Pass(NamedTuple):
    """lengths: committed tokens of each session chosen, before the pass."""

    lengths: list[int]
    computed: Computed


def decode_together(
    engine: Engine, batching: Batching, sessions: Sequence[GreedySession], *, chain: bool, present: int = 5
) -> list[Pass]:
    """All sessions to their end, `present` of them at most at a time, as a worker would: they come when one has gone,
    are late for some passes, and the last one is cancelled after two rounds."""
    random = np.random.default_rng(len(sessions))
    coming, here, passes = list(sessions), [], []
    queue: list[Waiting[Segment]] = []
    cancelled = sessions[-1]
    while coming or here:
        while coming and len(here) < present:
            here.append(coming.pop(0))
        for session in here:
            if session not in [each.session for each in queue] and (not queue or random.random() < 0.7):
                queue.append(Waiting(session, session.propose(chain=chain), float(len(passes))))
        chosen = batching.choose(queue, 64)
        lengths = [each.request.slot.committed_length for each in chosen]
        computed = batching.compute(engine, [each.request for each in chosen])
        passes.append(Pass(lengths, computed))
        for each, result in zip(chosen, computed.results, strict=True):
            each.session.take(result)
        queue = [each for each in queue if each not in chosen]
        here = [each for each in here if not each.done and not (each is cancelled and each.rounds == 2)]
    return passes
