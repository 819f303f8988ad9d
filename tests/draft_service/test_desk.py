"""A drafter's thread: how the work of its sessions shares passes, and that nothing one of them does reaches another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import torch

from draft_service.desk import Desk
from draft_service.drafters.base import Drafter
from draft_service.drafters.children import Children
from draft_service.drafters.eagle3 import Eagle3Drafter
from draft_service.drafters.head_engine import HeadRequest, HeadResult
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.registry import DRAFTERS
from draft_service.main import DraftService
from draft_service.opening import Opening
from draft_service.session import FeatureRows, Question, Session
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.cache import Slot
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.fakes import ScriptedDrafter
from tests.draft_service.heads import (
    BUDGET,
    CONTEXT,
    FEATURES,
    IDENTITY,
    PROMPT,
    VOCAB_SIZE,
    RecordingEngine,
    assert_same,
    open_session,
)

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (40, 12, 25, 3)
ROOT = 7


class BreakableEngine(RecordingEngine):
    """Breaks late in a pass, with the rows of all of its sessions written."""

    breaks = False

    def children(self, output: torch.Tensor, width: int) -> Children:
        if self.breaks:
            raise RuntimeError("broken")
        return super().children(output, width)


class GatedDrafter(Eagle3Drafter):
    """Stops in the pass that it is told to stop in, and breaks with the session that it is told to break with."""

    def __init__(self, engine: BreakableEngine) -> None:
        super().__init__(engine, IDENTITY, 4)
        self.engine = engine
        self.stop_in: int | None = None
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.breaks_with: Slot | None = None

    def compute(self, requests: Sequence[HeadRequest]) -> list[HeadResult]:
        if self.stop_in == len(self.engine.passes):
            self.stop_in = None
            self.stopped.set()
            assert self.go_on.wait(30)
        self.engine.breaks = any(request.segment.slot is self.breaks_with for request in requests)
        return super().compute(requests)


@pytest.fixture
def engine(head: Eagle3Head) -> BreakableEngine:
    return BreakableEngine(head)


@pytest.fixture
def drafter(engine: BreakableEngine) -> GatedDrafter:
    return GatedDrafter(engine)


@asynccontextmanager
async def desk_of(drafter: Drafter) -> AsyncIterator[Desk]:  # type: ignore[type-arg]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRAFTERS, "mine", lambda settings: drafter)
        desk = Desk("mine")
        await desk.load(DraftSettings())
    yield desk
    await desk.close()


@asynccontextmanager
async def sessions_at(desk: Desk, lengths: Sequence[int] = LENGTHS) -> AsyncIterator[list[Session]]:
    """One for each first part of the prompt, with the features of all of it."""
    async with AsyncExitStack() as stack:
        sessions = []
        for length in lengths:
            opening = Opening(1, "request", "mine", PROMPT[:length], BUDGET, VOCAB_SIZE, CONTEXT, 72)
            sessions.append(await stack.enter_async_context(desk.open(opening)))
            await desk.read_features(sessions[-1], FeatureRows(0, FEATURES[:length]))
        yield sessions


async def ask(desk: Desk, session: Session, length: int) -> TokenTree:
    return (await desk.propose(session, Question(1, length, [ROOT], BUDGET), [])).value


async def handed_in(*tasks: asyncio.Task[object]) -> None:
    """Return once each of the new tasks has given its work to the thread."""
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


def alone(engine: RecordingEngine, length: int) -> TokenTree:
    return open_session(RecordingEngine(engine.head_before), [*PROMPT[:length], ROOT]).propose(BUDGET)


async def test_proposals_that_wait_together_take_the_passes_of_one_and_give_each_its_own_tree(
    drafter: GatedDrafter, engine: RecordingEngine
) -> None:
    async with desk_of(drafter) as desk, sessions_at(desk, (2, *LENGTHS)) as [first, *others]:
        drafter.stop_in = 0
        held = asyncio.create_task(ask(desk, first, 2))
        await asyncio.to_thread(drafter.stopped.wait, 30)
        tasks = [asyncio.create_task(ask(desk, *each)) for each in zip(others, LENGTHS, strict=True)]
        await handed_in(held, *tasks)
        drafter.go_on.set()
        trees = await asyncio.gather(held, *tasks)
    for tree, length in zip(trees, (2, *LENGTHS), strict=True):
        assert_same(tree, alone(engine, length), 1e-5)
    # The first one's first level, then all five together; prompts to read and deeper trees add what they need.
    assert engine.sessions[:2] == [1, 5]
    assert len(engine.passes) <= 2 + BUDGET.depth


async def test_a_session_joins_at_the_next_level_of_another_and_a_prompt_is_read_beside_it(
    drafter: GatedDrafter, engine: RecordingEngine
) -> None:
    async with desk_of(drafter) as desk, sessions_at(desk, (3, 40, 5)) as [first, reader, late]:
        drafter.stop_in = 2
        tree = asyncio.create_task(ask(desk, first, 3))
        await asyncio.to_thread(drafter.stopped.wait, 30)
        reading = asyncio.create_task(desk.advance(reader))
        joined = asyncio.create_task(ask(desk, late, 5))
        await handed_in(tree, reading, joined)
        drafter.go_on.set()
        assert_same(await tree, alone(engine, 3), 1e-5)
        await reading
        assert engine.sessions[:4] == [1, 1, 1, 3]
        assert_same(await joined, alone(engine, 5), 1e-5)
        assert_same(await ask(desk, reader, 40), alone(engine, 40), 1e-5)


async def test_a_session_that_fails_in_a_shared_pass_fails_alone(
    drafter: GatedDrafter, engine: RecordingEngine
) -> None:
    async with desk_of(drafter) as desk, sessions_at(desk) as sessions:
        drafter.stop_in = 0
        tasks = [asyncio.create_task(ask(desk, *each)) for each in zip(sessions, LENGTHS, strict=True)]
        await asyncio.to_thread(drafter.stopped.wait, 30)
        await handed_in(*tasks)
        drafter.breaks_with = sessions[1]._draft._slot  # type: ignore[attr-defined]
        drafter.go_on.set()
        first, failure, *rest = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(failure, RuntimeError)
        for tree, length in zip([first, *rest], (40, 25, 3), strict=True):
            assert isinstance(tree, TokenTree)
            assert_same(tree, alone(engine, length), 1e-5)
        assert engine.sessions[:5] == [4, 1, 1, 1, 1]


async def test_a_proposal_that_is_cancelled_leaves_the_others_their_trees_and_its_memory_is_closed(
    drafter: GatedDrafter, engine: RecordingEngine
) -> None:
    closed, told = [], threading.Semaphore(0)

    def close(place: int) -> None:
        closed.append(place)
        told.release()

    async with desk_of(drafter) as desk:
        async with sessions_at(desk) as sessions:
            for place, session in enumerate(sessions):
                session._draft.close = partial(close, place)  # type: ignore[method-assign]
            drafter.stop_in = 3  # two of the tasks have a prompt to read first
            tasks = [asyncio.create_task(ask(desk, *each)) for each in zip(sessions, LENGTHS, strict=True)]
            await asyncio.to_thread(drafter.stopped.wait, 30)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            drafter.go_on.set()
            for place in (0, 2, 3):
                assert_same(await tasks[place], alone(engine, LENGTHS[place]), 1e-5)
            assert engine.sessions[3] == len(LENGTHS)
            assert max(engine.sessions[4:]) == len(LENGTHS) - 1
            assert closed == []
        for _ in LENGTHS:
            assert await asyncio.to_thread(told.acquire, timeout=30)
    assert sorted(closed) == [0, 1, 2, 3]


async def test_a_repeat_of_a_round_is_answered_without_a_pass(drafter: GatedDrafter, engine: RecordingEngine) -> None:
    async with desk_of(drafter) as desk, sessions_at(desk) as sessions:
        tree = await ask(desk, sessions[0], LENGTHS[0])
        passes = len(engine.passes)
        assert await ask(desk, sessions[0], LENGTHS[0]) is tree
        assert len(engine.passes) == passes


async def test_a_drafter_without_a_model_takes_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "compute", None)
    async with desk_of(NgramDrafter(1, 4, 8)) as desk, sessions_at(desk, (12,)) as [session]:
        tree = await ask(desk, session, 12)
        await desk.advance(session)
        assert tree.token_ids[0] == ROOT


async def test_a_drafter_that_hangs_is_told_as_a_hindrance_until_it_comes_back(scripted: ScriptedDrafter) -> None:
    service, desk = DraftService(DraftSettings(stall_seconds=0.01)), Desk("scripted")
    service._desks["scripted"] = desk
    await desk.load(DraftSettings())
    assert service.hindrance() is None
    scripted.go_on.clear()
    async with sessions_at(desk, (12,)) as [session]:
        work = asyncio.create_task(ask(desk, session, 12))
        await asyncio.to_thread(scripted.begun.wait, 30)
        while service.hindrance() is None:  # noqa: ASYNC110 -- time itself is what is waited for
            await asyncio.sleep(0.01)
        scripted.go_on.set()
        await work
        while desk.busy_since is not None:  # noqa: ASYNC110 -- the thread looks for more work first
            await asyncio.sleep(0)
        assert service.hindrance() is None
    await desk.close()
