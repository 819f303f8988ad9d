"""Budget: an answer is as long as it would be without a draft, at every limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

from eagle_pangu.client.client import violations_of
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.engine import Engine, ForwardResult
from eagle_pangu.speculation.segment import Segment
from protos.v1 import generation_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.systems import PROMPT, System, draft_settings, system, teacher_settings, tiny_engine
from tests.models import EOS, tiny_llama

pytestmark = MODULE_LOOP

LENGTH = generation_pb2.FINISH_REASON_LENGTH
ROWS = 16
SLOT = 64
CONTEXT = SLOT - ROWS
DRAFT_CONTEXT = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ending(self_draft: System) -> tuple[list[int], dict[int, float]]:
    """A prompt whose answer ends by itself after 5 to 11 tokens, with the bias that makes it."""
    for first, bias in ((first, {EOS: bias}) for first in range(256) for bias in (0.0, 2.0)):
        if 5 <= len((await self_draft.ask([first], drafter="none", max_tokens=12, logit_bias=bias)).token_ids) < 12:
            return [first], bias
    raise AssertionError("no answer of this model ends by itself")


@pytest.mark.parametrize("depth", range(1, 9))
async def test_delivered_is_usage_is_the_least_of_max_tokens_and_the_teacher_only_length(
    self_draft: System, ending: tuple[list[int], dict[int, float]], depth: int
) -> None:
    """For answers that go on, and for one that ends by itself in between."""
    for prompt, bias in ((PROMPT, {}), ending):
        plain = await self_draft.ask(prompt, drafter="none", max_tokens=12, logit_bias=bias)
        asks = [
            self_draft.ask(prompt, budget=(8, depth), max_tokens=max_tokens, logit_bias=bias)
            for max_tokens in range(1, 13)
        ]
        for max_tokens, answer in enumerate(await asyncio.gather(*asks), start=1):
            assert answer.token_ids == plain.token_ids[:max_tokens]
            assert answer.usage.completion_tokens == min(max_tokens, len(plain.token_ids))
            reason = LENGTH if max_tokens < len(plain.token_ids) else plain.finish_reason
            assert answer.finish_reason == reason
            assert answer.speculation.fallback_rounds == 0


class Furthest:
    """How far an engine was asked to go: positions of rows, and columns of the slot beside its capacity."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.position = 0
        self.beyond_slot = -SLOT
        run = engine.run

        def watched(segments: Sequence[Segment], *args: Any) -> list[ForwardResult]:
            for segment in segments:
                slot, tree = segment.slot, segment.tree
                self.position = max(self.position, slot.committed_length + int(np.max(tree.depth)))
                self.beyond_slot = max(self.beyond_slot, slot.committed_length + tree.rows - slot.capacity)
            return run(segments, *args)

        monkeypatch.setattr(engine, "run", watched)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["slot", "model"])
async def short(
    request: pytest.FixtureRequest, engine: Engine, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> AsyncIterator[tuple[System, Engine]]:
    """Sequences end at CONTEXT tokens, for want of room in a slot or because of the model; the draft's at fewer."""
    directory, capacity = model, SLOT
    if request.param == "model":
        name = tmp_path_factory.mktemp("short") / "teacher"
        directory = tiny_llama(name, num_hidden_layers=2, max_position_embeddings=CONTEXT)
        engine, capacity = tiny_engine(directory), 320
    draft = draft_settings(model, drafter="standalone", slot_capacity=DRAFT_CONTEXT)
    teacher = teacher_settings(directory, slot_capacity=capacity, max_rows=ROWS)
    async with system(engine, draft, teacher) as each:
        yield each, engine


@pytest.mark.parametrize("beyond", [-1, 0, 1, 7])
async def test_prompt_and_answer_together_end_at_the_context_limit(
    short: tuple[System, Engine], beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, engine = short
    furthest = Furthest(engine, monkeypatch)
    for prompt_tokens in (CONTEXT - 20, CONTEXT - 9, CONTEXT - 1):
        prompt = [30 + place for place in range(prompt_tokens)]
        max_tokens = max(1, CONTEXT - prompt_tokens + beyond)
        expected = min(max_tokens, CONTEXT - prompt_tokens)
        plain, *drafted = [
            await each.ask(prompt, drafter=drafter, budget=budget, max_tokens=max_tokens, ignore_eos=True)
            for drafter, budget in (
                ("none", (0, 0)),
                ("standalone", (16, 8)),
                ("standalone", (3, 3)),
                ("ngram", (8, 6)),
            )
        ]
        assert (len(plain.token_ids), plain.finish_reason) == (expected, LENGTH)
        for answer in drafted:
            assert answer.token_ids == plain.token_ids
            assert answer.usage.completion_tokens == expected
            assert answer.finish_reason == LENGTH
    assert furthest.position < CONTEXT
    assert furthest.beyond_slot <= 0


async def test_past_the_drafts_own_context_decoding_goes_on_without_it(short: tuple[System, Engine]) -> None:
    each, _ = short
    plain = await each.ask(drafter="none", max_tokens=40, ignore_eos=True)
    answer = await each.ask(budget=(8, 4), max_tokens=40, ignore_eos=True)
    stats = answer.speculation
    assert answer.token_ids == plain.token_ids
    assert stats.accepted > 0
    assert stats.fallback_rounds == 0
    within = DRAFT_CONTEXT - len(PROMPT)
    assert stats.rounds >= len(plain.token_ids) - within
    late = await each.ask([30] * (DRAFT_CONTEXT + 1), budget=(8, 4), max_tokens=5, ignore_eos=True)
    assert (late.speculation.drafted, late.speculation.rounds, late.speculation.fallback_rounds) == (0, 4, 0)


async def test_a_prompt_that_is_too_long_is_refused_and_harms_nobody_beside_it(short: tuple[System, Engine]) -> None:
    each, _ = short
    alone = await each.ask(drafter="none", max_tokens=12)
    too_long = [each.ask([5] * length, max_tokens=4) for length in (CONTEXT, CONTEXT + 1, 5 * CONTEXT)]
    answers = await asyncio.gather(*too_long, *(each.ask(max_tokens=12) for _ in range(6)), return_exceptions=True)
    for error in answers[:3]:
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        [violation] = violations_of(error)
        assert violation.field == "options.prompt_token_ids.ids"
        assert f"at most {CONTEXT - 1} tokens" in violation.reason
    for answer in answers[3:]:
        assert isinstance(answer, generation_pb2.GenerateResponse)
        assert answer.token_ids == alone.token_ids
    await each.all_slots_free()


async def test_a_budget_above_the_configured_one_is_refused_by_field(self_draft: System) -> None:
    for budget, field in (((17, 8), "rows"), ((16, 9), "depth")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self_draft.ask(budget=budget)
        assert [violation.field for violation in violations_of(caught.value)] == [f"options.budget.{field}"]


async def test_a_budget_that_the_draft_service_does_not_allow_costs_only_the_draft(
    engine: Engine, model: Path, every_drafter: DraftSettings
) -> None:
    smaller = every_drafter.model_copy(update={"max_rows": 4})
    async with system(engine, smaller, teacher_settings(model)) as each:
        plain = await each.ask(drafter="none", max_tokens=10)
        answer = await each.ask(drafter="ngram", budget=(8, 4), max_tokens=10)
        assert answer.token_ids == plain.token_ids
        # A round that falls between two tries has no draft to ask.
        assert {"refused"} <= {*answer.speculation.fallback_reasons} <= {"refused", "unavailable"}
