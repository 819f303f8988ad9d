"""Counters: what an answer says about its rounds is what happened in them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from protos.v1 import generation_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.mixtures import DRAFTERS, mixture
from tests.conformance.systems import LETTERS, PROMPT, System

pytestmark = MODULE_LOOP


def assert_consistent(answer: generation_pb2.GenerateResponse, rows: int) -> None:
    """What holds for every answer; `cut` is 1 where a stop took the last round's own token."""
    stats, emitted = answer.speculation, len(answer.token_ids)
    assert 0 <= stats.accepted <= stats.drafted <= stats.rounds * rows
    cut = 1 + stats.accepted + stats.rounds - emitted
    assert cut in (0, 1)
    if answer.finish_reason == generation_pb2.FINISH_REASON_LENGTH:
        assert cut == 0
    assert 0 <= stats.fallback_rounds <= stats.rounds
    assert bool(stats.fallback_rounds) == bool(stats.fallback_reasons)
    assert answer.usage.completion_tokens == emitted
    assert stats.tokens_per_round == pytest.approx((emitted - 1) / stats.rounds if stats.rounds else 0, rel=1e-5)
    times = stats.timings
    parts = [times.draft_us, times.wire_us, times.queue_us, times.teacher_us, times.commit_us, times.orchestrator_us]
    assert sum(parts) >= times.rounds_us


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_counters_are_consistent_whatever_is_asked(self_draft: System, drafter: str) -> None:
    requests = [mixture(number) for number in range(1000, 1012)]
    answers = await asyncio.gather(*(self_draft.send(asked, drafter=drafter) for asked in requests))
    for asked, answer in zip(requests, answers, strict=True):
        assert_consistent(answer, asked.budget.rows)
        if drafter == "none":
            assert (answer.speculation.drafter, answer.speculation.drafted) == ("none", 0)


async def test_the_drafter_named_does_not_depend_on_what_was_asked_before(self_draft: System) -> None:
    """Not even where the first token is the whole answer."""
    for _ in range(2):
        answer = await self_draft.ask(PROMPT, drafter="hybrid", max_tokens=1)
        assert answer.speculation.drafter == "hybrid"


def counted(right: Sequence[int], tokens: int, rows: int, depth: int) -> dict[str, int]:
    """What a chain with so many right tokens in turn must give."""
    emitted, counts = 1, {"rounds": 0, "drafted": 0, "accepted": 0}
    while emitted < tokens:
        drafted = min(rows, depth, tokens - emitted - 1)
        accepted = min(drafted, right[counts["rounds"] % len(right)])
        counts["rounds"] += 1
        counts["drafted"] += drafted
        counts["accepted"] += accepted
        emitted += accepted + 1
    assert emitted == tokens
    return counts


@pytest.mark.parametrize("right", [(0,), (1,), (8,), (0, 3, 5), (2, 0, 0, 8, 1)])
@pytest.mark.parametrize("budget", [(8, 8), (3, 8), (8, 2), (1, 1)])
async def test_counters_agree_with_a_scripted_draft_exactly(
    scripted_draft: System, right: tuple[int, ...], budget: tuple[int, int]
) -> None:
    plain = await scripted_draft.ask(drafter="none", max_tokens=24, ignore_eos=True)
    scripted_draft.knows(PROMPT, plain.token_ids, *right)
    answer = await scripted_draft.ask(max_tokens=24, ignore_eos=True, budget=budget)
    assert answer.token_ids == plain.token_ids
    found = {name: getattr(answer.speculation, name) for name in ("rounds", "drafted", "accepted")}
    assert found == counted(right, 24, *budget)
    assert answer.speculation.fallback_rounds == 0
    assert_consistent(answer, budget[0])
    assert scripted_draft.scripted.faults == []


@pytest.mark.parametrize("budget", [(0, 8), (8, 0), (0, 0)])
async def test_a_budget_without_rows_or_depth_is_plain_decoding(
    scripted_draft: System, budget: tuple[int, int]
) -> None:
    plain = await scripted_draft.ask(drafter="none", max_tokens=8)
    scripted_draft.knows(PROMPT, plain.token_ids, 8)
    answer = await scripted_draft.ask(max_tokens=8, budget=budget)
    assert answer.token_ids == plain.token_ids
    assert (answer.speculation.drafted, answer.speculation.rounds) == (0, 7)
    assert scripted_draft.scripted.asked == []


@pytest.mark.parametrize("place", range(2, 10))
async def test_what_a_stop_cuts_off_is_not_counted_as_accepted(scripted_draft: System, place: int) -> None:
    """Eight rows are right; the stop falls on one of them, or on the token after the last."""
    writing = {"allowed_token_ids": LETTERS, "max_tokens": 24}
    plain = await scripted_draft.ask(drafter="none", **writing)
    scripted_draft.knows(PROMPT, plain.token_ids, 8)
    stop = plain.text[:place]
    answer = await scripted_draft.ask(stop=[stop], budget=(8, 8), **writing)
    assert answer.token_ids == plain.token_ids[:place]
    stats = answer.speculation
    assert (stats.rounds, stats.drafted, stats.accepted) == (1, 8, min(place - 1, 8))
