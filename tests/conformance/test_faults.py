"""Faults: whatever breaks, the client gets the teacher's tokens or a clear status, and never waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from eagle_pangu.client.client import violations_of
from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.health import is_serving
from eagle_pangu.serving.settings import ServerSettings
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import generation_pb2, teacher_pb2, tree_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.mixtures import assert_same_answer
from tests.conformance.systems import LETTERS, PROMPT, Known, System, system, teacher_settings
from tests.models import EOS
from tests.orchestrator.scripted import Asked, ScriptedDraft, proposal
from tests.teacher_service.peer import PeerSession

pytestmark = MODULE_LOOP

TOKENS = 20
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "presence_penalty": 1.0, "allowed_token_ids": LETTERS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty(engine: Engine, model: Path) -> AsyncIterator[System]:
    """A scripted draft that is waited for a fifth of a second."""
    known = Known()
    draft = ScriptedDraft(known.chain(0), known)
    async with system(engine, draft, teacher_settings(model), draft_deadline_seconds=0.2) as each:
        yield each


def nothing(asked: Asked, _good: TokenTree) -> Any:
    return []


def root_alone(asked: Asked, _good: TokenTree) -> Any:
    return TokenTree.root_only(asked.sequence[-1])


def no_rows(asked: Asked, _good: TokenTree) -> Any:
    return tree_pb2.TokenTree()


def wrong_root(asked: Asked, good: TokenTree) -> Any:
    return TokenTree.build([(asked.sequence[-1] + 1) % 256, *good.token_ids[1:].tolist()], good.parents.tolist())


def cycle(asked: Asked, good: TokenTree) -> Any:
    return tree_pb2.TokenTree(token_ids=[asked.sequence[-1], 5, 6], parents=[0, 2, 1])


def too_deep(asked: Asked, _good: TokenTree) -> Any:
    return TokenTree.build([asked.sequence[-1], *range(asked.depth + 1)], [0, *range(asked.depth + 1)])


def too_many(asked: Asked, _good: TokenTree) -> Any:
    return TokenTree.build([asked.sequence[-1], *range(asked.rows + 1)], [0] * (asked.rows + 2))


def refusal(asked: Asked, _good: TokenTree) -> Any:
    return teacher_pb2.Rejection(round=asked.round, code=3, field="budget", reason="no")


def twice(asked: Asked, good: TokenTree) -> Any:
    return [proposal(asked, good), proposal(asked, good)]


FAULTS: dict[Callable[[Asked, TokenTree], Any], set[str]] = {
    nothing: {"deadline"},
    root_alone: set(),
    no_rows: {"invalid_tree"},
    wrong_root: {"invalid_tree"},
    cycle: {"invalid_tree"},
    too_deep: {"invalid_tree"},
    too_many: {"invalid_tree"},
    refusal: {"refused"},
    twice: set(),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_draft_that_fails_in_random_rounds_costs_no_token_and_is_told(
    hasty: System, fault: Callable[[Asked, TokenTree], Any]
) -> None:
    """A draft that hangs, returns no rows, or breaks a rule, in half of its rounds."""
    plain = await hasty.ask(drafter="none", max_tokens=TOKENS, **SAMPLED)
    good, chance = hasty.knows(PROMPT, plain.token_ids, 2).chain(2, 0), random.Random(1)

    def plan(asked: Asked) -> Any:
        fails = asked.number == 1 or (asked.number > 1 and chance.random() < 0.5)
        return fault(asked, good(asked)) if fails else good(asked)

    hasty.scripted.plan = plan
    answer = await hasty.ask(max_tokens=TOKENS, budget=(3, 3), **SAMPLED)
    assert_same_answer(answer, plain)
    assert set(answer.speculation.fallback_reasons) == FAULTS[fault]
    assert answer.speculation.accepted > 0


async def test_a_draft_that_answers_late_is_used_again_in_the_same_request(hasty: System) -> None:
    plain = await hasty.ask(drafter="none", max_tokens=100, ignore_eos=True)
    hasty.knows(PROMPT, plain.token_ids, 1)

    async def be_late(asked: Asked, _context: grpc.aio.ServicerContext) -> None:
        if asked.number == 1:
            await asyncio.sleep(0.3)  # past the deadline, and nothing tells when that is over

    hasty.scripted.on_propose = be_late
    answer = await hasty.ask(max_tokens=100, ignore_eos=True, budget=(1, 1))
    hasty.scripted.on_propose = None
    assert_same_answer(answer, plain)
    assert list(answer.speculation.fallback_reasons) == ["deadline"]
    assert len(hasty.scripted.asked) > 2
    assert answer.speculation.accepted > 1
    assert hasty.scripted.faults == []


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_draft_that_crashes_in_random_rounds_costs_no_token(hasty: System, code: grpc.StatusCode) -> None:
    plain = await hasty.ask(drafter="none", max_tokens=TOKENS, **SAMPLED)
    hasty.knows(PROMPT, plain.token_ids, 2)

    async def crash(asked: Asked, context: grpc.aio.ServicerContext) -> None:
        if asked.number in (1, 2, 5):
            await context.abort(code, "crashed")

    hasty.scripted.on_propose = crash
    answer = await hasty.ask(max_tokens=TOKENS, budget=(3, 3), **SAMPLED)
    hasty.scripted.on_propose = None
    assert_same_answer(answer, plain)
    assert answer.speculation.fallback_rounds > 0
    assert answer.speculation.accepted > 0


@pytest.mark.parametrize("drafter", ["none", "eagle3", "standalone"])
@pytest.mark.parametrize("failing", [{0}, {3}, {1, 4, 5}])
async def test_after_an_exception_inside_a_forward_pass_decoding_goes_on(
    self_draft: System, engine: Engine, monkeypatch: pytest.MonkeyPatch, drafter: str, failing: set[int]
) -> None:
    """In a new session on the answer so far, with the same seed and the same history for the penalties."""
    plain = await self_draft.ask(drafter="none", max_tokens=12, **SAMPLED)
    run, passes = engine.run, iter(range(1000))

    def fail(segments: Sequence[Segment], *args: Any) -> Any:
        if not any(segment.final for segment in segments) and next(passes) in failing:
            raise RuntimeError("secret of the forward pass")
        return run(segments, *args)

    monkeypatch.setattr(engine, "run", fail)
    beside = asyncio.create_task(self_draft.ask(drafter="none", max_tokens=12, **SAMPLED))
    answer = await self_draft.ask(drafter=drafter, max_tokens=12, budget=(4, 2), **SAMPLED)
    assert_same_answer(answer, plain)
    assert_same_answer(await beside, plain)
    await self_draft.all_slots_free()


async def test_a_forward_pass_that_always_fails_ends_in_a_status_that_tells_no_secret(
    self_draft: System, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.run
    for prompts in (False, True):

        def fail(segments: Sequence[Segment], *args: Any, prompts: bool = prompts) -> Any:
            if any(segment.final == prompts for segment in segments):
                raise RuntimeError("secret of the forward pass")
            return run(segments, *args)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "run", fail)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await self_draft.ask(drafter="none", max_tokens=12)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
        assert "secret" not in (caught.value.details() or "")
    await self_draft.all_slots_free()
    assert (await self_draft.ask(drafter="none", max_tokens=3)).token_ids


PROMPTS = {
    "whitespace": " \t\n",
    "only special tokens": "<|im_start|><|im_end|><|endoftext|><pad>",
    "NUL": "\0",
    "NUL inside": "a\0b",
    "replacement character": "\N{REPLACEMENT CHARACTER}",
    "one end of sequence": [EOS],
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
async def test_odd_prompts_are_answered_as_any_other(self_draft: System, prompt: Any) -> None:
    plain = await self_draft.ask(prompt, drafter="none", max_tokens=8)
    assert len(plain.token_ids) >= 1
    assert_same_answer(await self_draft.ask(prompt, max_tokens=8), plain)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "options.prompt"),
        ([], "options.prompt_token_ids.ids"),
        ("x" * 2**20, "options.prompt"),
        ("x" * (2**20 + 1), "options.prompt"),
        ([1] * 300_000, "options.prompt_token_ids.ids"),
    ],
    ids=["empty", "no ids", "1 MB", "over 1 MB", "300,000 ids"],
)
async def test_prompts_that_cannot_be_served_are_refused_by_name(self_draft: System, prompt: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await self_draft.ask(prompt, max_tokens=2)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in violations_of(caught.value)] == [field]
    await self_draft.all_slots_free()


async def test_a_conversation_without_text_is_answered(self_draft: System) -> None:
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="")])
    asked = generation_pb2.GenerationOptions(chat=chat, max_tokens=4)
    assert_same_answer(await self_draft.send(asked), await self_draft.send(asked, drafter="none"))


async def test_more_rows_or_depth_than_configured_are_refused_when_a_session_opens(self_draft: System) -> None:
    model = await self_draft.model()
    for field, budget in (
        ("rows", tree_pb2.TreeBudget(rows=model.max_budget.rows + 1, depth=1)),
        ("depth", tree_pb2.TreeBudget(rows=1, depth=model.max_budget.depth + 1)),
    ):
        session = PeerSession(self_draft.teacher_stub, model.fingerprint)
        await session.send_open([1, 2, 3], max_budget=budget)
        code, details = await session.status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"open.max_budget.{field}" in details


async def test_health_is_served_by_the_name_of_the_service(self_draft: System) -> None:
    async with channel(self_draft.target, ServerSettings()) as connection:
        assert await is_serving(connection, "eagle_pangu.v1.GenerationService")
        assert await is_serving(connection, "")
