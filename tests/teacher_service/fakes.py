"""An engine with known logits, in the shape of `eagle_pangu.speculation.engine.Engine`, and no model.

The token after a history is a pure function of the whole history, so a wrong commit, a wrong path or a mutated slot
shows in the next token. A hook before each pass lets a test hold the worker, or make a pass fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.engine import ForwardResult, Numerics
from eagle_pangu.speculation.tree import TokenTree

VOCAB_SIZE = 97
FEATURE_WIDTH = 6
CONTEXT_LIMIT = 120
MARGIN = 2.5


def next_token(history: Sequence[int]) -> int:
    """What the fake teacher decides after a history."""
    return (sum((place + 1) * token for place, token in enumerate(history)) + 5) % VOCAB_SIZE


def answer(prompt: Sequence[int], tokens: int) -> list[int]:
    """Teacher-only decoding, by definition."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


def feature_row(history: Sequence[int]) -> list[float]:
    """Features of the last token of a history: token, position and zeros; exact in bfloat16."""
    return [float(history[-1]), float(len(history) - 1)] + [0.0] * (FEATURE_WIDTH - 2)


def root_only(history: list[int]) -> TokenTree:
    return TokenTree.root_only(history[-1])


def half_right(history: list[int]) -> TokenTree:
    """Two branches; the deeper one is right for two rows and wrong in the third."""
    one, two, three = answer(history, 3)
    tokens = [history[-1], (one + 1) % VOCAB_SIZE, one, two, (three + 1) % VOCAB_SIZE]
    return TokenTree.build(tokens, [0, 0, 0, 2, 3])


@dataclass(frozen=True)
class FakeTokenizer:
    json: bytes = b"{}"
    chat_template: str = "{{ messages }}"
    sha256: str = "ab" * 32
    special_tokens: dict[str, str] = field(default_factory=lambda: {"eos_token": "<e>"})


@dataclass(frozen=True)
class FakeCheckpoint:
    name: str = "fake"
    tokenizer: FakeTokenizer = FakeTokenizer()
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (3, 7)
    context_limit: int = CONTEXT_LIMIT
    feature_width: int = FEATURE_WIDTH


class FakeSlot:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.history: list[int] = []
        self.branch: TokenTree | None = None

    @property
    def committed_length(self) -> int:
        return len(self.history)

    def adopt(self, source: FakeSlot, length: int) -> None:
        assert not self.history
        assert 0 < length <= source.committed_length
        self.history = source.history[:length]

    def keep(self) -> FakeSlot:
        kept = FakeSlot(self.committed_length)
        kept.history = list(self.history)
        return kept


class FakeEngine:
    """`calls` holds one line a pass or commit, in the order of the worker."""

    def __init__(self) -> None:
        self.checkpoint = FakeCheckpoint()
        self.numerics = Numerics("float32", "bitwise", "reference", "")
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda call: None
        self.slots: list[FakeSlot] = []

    def open_slot(self, capacity: int) -> FakeSlot:
        self.slots.append(FakeSlot(capacity))
        return self.slots[-1]

    def prefill(
        self,
        slot: FakeSlot,
        token_ids: NDArray[np.int64],
        *,
        want_logits: bool,
        want_features: bool = False,
        every_row: bool = False,
    ) -> ForwardResult:
        self._pass(f"prefill {slot.committed_length}+{len(token_ids)} of {(slot.history + token_ids.tolist())[0]}")
        histories = [slot.history + token_ids[: n + 1].tolist() for n in range(len(token_ids))]
        slot.history = histories[-1]
        scored = histories if every_row else histories[-1:]
        return self._result(histories, scored if want_logits else None, want_features)

    def verify(self, slot: FakeSlot, tree: TokenTree, *, want_features: bool = False) -> ForwardResult:
        self._pass(f"verify {tree.rows} of {slot.history[0]}")
        assert slot.committed_length + tree.rows <= slot.capacity
        slot.branch = tree
        paths = [tree.ancestors[row, : depth + 1] for row, depth in enumerate(tree.depth)]
        histories = [slot.history + tree.token_ids[path].tolist() for path in paths]
        return self._result(histories, histories, want_features)

    def commit(self, slot: FakeSlot, rows: Sequence[int]) -> None:
        self._pass(f"commit {list(rows)} of {slot.history[0]}")
        assert slot.branch is not None
        slot.history += slot.branch.token_ids[[0, *rows]].tolist()
        slot.branch = None

    def warm_up(self) -> None:
        self.calls.append("warm up")

    def _pass(self, call: str) -> None:
        self.calls.append(call)
        self.before(call)

    @staticmethod
    def _result(histories: list[list[int]], scored: list[list[int]] | None, want_features: bool) -> ForwardResult:
        logits = None
        if scored is not None:
            logits = torch.zeros(len(scored), VOCAB_SIZE)
            logits[torch.arange(len(scored)), torch.tensor([next_token(history) for history in scored])] = MARGIN
        features = torch.tensor([feature_row(history) for history in histories]).bfloat16() if want_features else None
        return ForwardResult(logits, features)


class Gate:
    """Holds the passes whose call starts with `holds`, and lets them through one by one."""

    def __init__(self, engine: FakeEngine, holds: str) -> None:
        self.entered, self.permits = threading.Semaphore(0), threading.Semaphore(0)
        self.holds = holds
        engine.before = self._wait

    def _wait(self, call: str) -> None:
        if call.startswith(self.holds):
            self.entered.release()
            assert self.permits.acquire(timeout=20)

    async def reached(self) -> None:
        """Return once a pass waits at the gate."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=20)

    def let(self, passes: int = 1) -> None:
        self.permits.release(passes)
