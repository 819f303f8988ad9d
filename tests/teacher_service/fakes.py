"""An engine with known logits, in the shape of `eagle_pangu.speculation.engine.Engine`, and no model.

`commit` and `run` are all that it does, as sessions and scheduler call it; `drive` stands in for both of these.

The token after a history is a pure function of the whole history, so a wrong commit, a wrong path or a mutated slot
shows in the next token. A hook before each pass lets a test hold the worker, or make a pass fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar

import torch

from eagle_pangu.speculation.buckets import SeenShapes
from eagle_pangu.speculation.devices.base import Memory
from eagle_pangu.speculation.engine import ForwardResult, Numerics
from eagle_pangu.speculation.plan import whole_blocks
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree
from teacher_service.passes import Passed, PassShare
from teacher_service.replies import Chunk
from teacher_service.session import Session, Steps

T = TypeVar("T")

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
    adds_bos: bool = False


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
    """`calls` holds one line a session's part of a pass, and one a commit, in the order of the worker; `passes` the
    sessions of each pass."""

    def __init__(self) -> None:
        self.checkpoint = FakeCheckpoint()
        self.numerics = Numerics("float32", "bitwise", "reference", "", "blocked", "")
        self.device = SimpleNamespace(
            name="cpu", synchronize=lambda: None, memory=lambda: Memory(self.free_bytes, self.free_bytes)
        )
        self.cache_shape = SimpleNamespace(bytes_per_token=2**14)
        self.free_bytes = 2**40
        self.calls: list[str] = []
        self.passes: list[int] = []
        self.before: Callable[[str], None] = lambda call: None
        self.slots: list[FakeSlot] = []
        self.shapes: SeenShapes | None = None
        self.spare_columns = 0

    def slot_columns(self, capacity: int) -> int:
        return whole_blocks(capacity)

    def open_slot(self, capacity: int) -> FakeSlot:
        self.slots.append(FakeSlot(capacity))
        return self.slots[-1]

    def run(self, segments: Sequence[Segment]) -> list[ForwardResult]:
        """Where a hook fails, nothing has happened yet."""
        self.passes.append(len(segments))
        for segment in segments:
            slot, tokens = segment.slot, segment.tree.token_ids.tolist()
            if segment.final:
                self._pass(f"prefill {slot.committed_length}+{segment.rows} of {(slot.history + tokens)[0]}")
            else:
                self._pass(f"verify {segment.rows} of {slot.history[0]}")
        return [self._read(segment) if segment.final else self._verify(segment) for segment in segments]

    def _read(self, segment: Segment) -> ForwardResult:
        slot, tokens = segment.slot, segment.tree.token_ids.tolist()
        histories = [slot.history + tokens[: n + 1] for n in range(len(tokens))]
        slot.history = histories[-1]
        scored = None if segment.logits_from is None else histories[segment.logits_from :]
        return self._result(histories, scored, segment.want_features)

    def _verify(self, segment: Segment) -> ForwardResult:
        slot, tree = segment.slot, segment.tree
        assert slot.committed_length + tree.rows <= slot.capacity
        slot.branch = tree
        paths = [tree.ancestors[row, : depth + 1] for row, depth in enumerate(tree.depth)]
        histories = [slot.history + tree.token_ids[path].tolist() for path in paths]
        return self._result(histories, histories, segment.want_features)

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
        return ForwardResult(len(histories), logits, features)


def drive(engine: FakeEngine, steps: Steps[T]) -> T:
    """Everything that a session asks for, alone."""
    try:
        request = next(steps)
        while True:
            request = _answered(engine, steps, request)
    except StopIteration as stop:
        return stop.value


def chunks_of(engine: FakeEngine, session: Session) -> Iterator[Chunk]:
    """The chunks of a session's prompt, each computed when it is asked for."""
    got: list[Chunk] = []
    steps = session.prefill(got.append)
    request = next(steps)
    while request is not None:
        try:
            request = _answered(engine, steps, request)
        except StopIteration:
            request = None
        yield got.pop()


def _answered(engine: FakeEngine, steps: Steps[T], request: Segment | Session) -> Segment | Session:
    try:
        segment = request if isinstance(request, Segment) else request.chunk(request.prepare())
        [result] = engine.run([segment])
    except Exception as error:  # noqa: BLE001 -- the session's to handle
        return steps.throw(error)
    return steps.send(Passed(result, PassShare(1, segment.rows, 0)))


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
