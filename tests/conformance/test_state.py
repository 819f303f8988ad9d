"""State: nothing is left of a session for the next one, and nothing of an old message for a live one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from draft_service.main import DraftService
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_features
from protos.v1 import draft_pb2, draft_pb2_grpc, generation_pb2, tree_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.mixtures import DRAFTERS, assert_same_answer
from tests.conformance.systems import PROMPT, SECONDS, System, options, system, teacher_settings
from tests.orchestrator.scripted import Asked, proposal
from tests.teacher_service.peer import PeerSession

pytestmark = MODULE_LOOP

STATS = ("drafter", "rounds", "drafted", "accepted", "fallback_rounds")
LONG = [(place * 37) % 256 for place in range(150)]


def stats_of(answer: generation_pb2.GenerateResponse) -> list[Any]:
    return [getattr(answer.speculation, name) for name in STATS]


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_a_short_request_after_a_long_one_on_the_same_slot_is_as_on_a_fresh_server(
    engine: Engine, model: Path, every_drafter: DraftSettings, drafter: str
) -> None:
    """And a prompt asked three times between others is the same three times, acceptance included."""
    one_slot = teacher_settings(model, slots=1)
    asked = options(PROMPT, max_tokens=10, drafter=drafter, budget=(6, 3))
    async with system(engine, every_drafter, one_slot) as fresh:
        expected = await fresh.send(asked)
    async with system(engine, every_drafter, one_slot) as used:
        for number in range(3):
            await used.ask(LONG[: 150 - number], max_tokens=16, drafter=drafter, budget=(16, 4))
            answer = await used.send(asked)
            assert_same_answer(answer, expected)
            assert stats_of(answer) == stats_of(expected)


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_a_prompt_read_before_gives_the_same_tokens_logits_and_drafts(
    engine: Engine, model: Path, every_drafter: DraftSettings, drafter: str
) -> None:
    """By a teacher that keeps prefixes as by one that keeps none; `cached_prompt_tokens` tells them apart."""
    asked = options(LONG, max_tokens=8, drafter=drafter, budget=(6, 3), temperature=1.0, seed=2, logprobs=2)
    longer = options([*LONG, 1, 2], max_tokens=8, drafter=drafter, budget=(6, 3), return_margins=True)
    none, kept = [teacher_settings(model, prefix_cache_tokens=tokens) for tokens in (0, 8192)]
    async with system(engine, every_drafter, none) as each:
        expected = [await each.send(request) for request in (asked, asked, longer)]
        assert {answer.usage.cached_prompt_tokens for answer in expected} == {0}
    async with system(engine, every_drafter, kept) as each:
        answers = [await each.send(request) for request in (asked, asked, longer)]
        cached = [answer.usage.cached_prompt_tokens for answer in answers]
        assert cached[0] == 0
        assert len(LONG) // 2 < min(cached[1:])
        assert max(cached) <= len(LONG)
        assert (await each.model()).prefix_cache.hit_tokens == sum(cached)
    for answer, other in zip(answers, expected, strict=True):
        assert_same_answer(answer, other)
        assert stats_of(answer) == stats_of(other)


async def test_chunked_and_whole_prefill_give_the_same_features_drafts_and_tokens(
    engine: Engine, model: Path, every_drafter: DraftSettings, tmp_path: Path
) -> None:
    features, trees, answers = [], [], []
    for chunk in (7, 64, 256):
        trace = tmp_path / f"{chunk}.jsonl"
        settings = teacher_settings(model, prefill_chunk=chunk)
        async with system(engine, every_drafter, settings, trace=trace) as each:
            session = PeerSession(each.teacher_stub, (await each.model()).fingerprint)
            await session.open(LONG, want_features=True)
            width = engine.checkpoint.feature_width
            features.append(np.concatenate([decode_features(part, width) for part in session.features]))
            await session.close()
            asked = options(LONG, max_tokens=8, budget=(6, 3), ignore_eos=True)
            answers += [await each.send(asked, drafter=drafter) for drafter in DRAFTERS[1:]]
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        rounds = [line["tree"] for line in lines if line["event"] == "round"]
        trees.append([(tree["token_ids"], tree["parents"]) for tree in rounds])
    assert len(features[0]) == len(LONG)
    for other in features[1:]:
        np.testing.assert_array_equal(other, features[0])
    assert trees[1:] == [trees[0]] * 2
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


async def test_streams_cancelled_at_random_points_leave_every_slot_free(self_draft: System) -> None:
    """Before the first message, after some of them, and while a round or a prefill runs."""
    chance = random.Random(0)
    read = 0

    async def begin_and_leave(number: int) -> None:
        nonlocal read
        prompt = LONG[: chance.choice([1, 20, 150])]
        asked = options(prompt, max_tokens=40, drafter=DRAFTERS[number % 5], budget=(4, 2), ignore_eos=True)
        deltas = self_draft.client.generate_stream(asked, seconds=SECONDS)
        if number % 8 == 0:
            for _ in range(chance.randint(1, 3)):
                await anext(deltas)
                read += 1
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(deltas), chance.choice([0, 0.001, 0.02]))
        await deltas.aclose()

    numbers = iter(range(1000))

    async def work() -> None:
        for number in numbers:
            await begin_and_leave(number)

    expected = await self_draft.ask(PROMPT, max_tokens=8, drafter="none")
    await asyncio.gather(*(work() for _ in range(12)))
    assert read > 100
    await self_draft.all_slots_free()
    for drafter in DRAFTERS:
        assert_same_answer(await self_draft.ask(PROMPT, max_tokens=8, drafter=drafter), expected)


async def test_a_late_message_of_an_old_epoch_touches_nothing_at_the_teacher(self_draft: System) -> None:
    plain = await self_draft.ask(PROMPT, max_tokens=6, drafter="none", ignore_eos=True)
    session = PeerSession(self_draft.teacher_stub, (await self_draft.model()).fingerprint)
    answer = [(await session.open(PROMPT)).next_token_id]
    for number in range(1, 6):
        length = len(PROMPT) + number - 1
        for stale in ({"epoch": 7}, {"number": number + 1}, {"committed_length": length + 1}):
            fields = {"number": number, "committed_length": length, "commit": 0, **stale}
            rejection = (await session.verify(tree=TokenTree.build([answer[-1], 5], [0, 0]), **fields)).rejection
            assert rejection.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        verdict = await session.verdict(number, length, 0, TokenTree.root_only(answer[-1]))
        answer.append(verdict.next_token_id)
    assert answer == list(plain.token_ids)
    await session.close()


async def test_a_late_message_of_an_old_epoch_touches_nothing_at_the_draft(
    self_draft: System, every_drafter: DraftSettings
) -> None:
    fingerprint = (await self_draft.model()).fingerprint
    budget = tree_pb2.TreeBudget(rows=4, depth=2)

    async def trees(stub: Any, stale: bool) -> list[Any]:
        call, found = stub.Propose(), []
        opening = draft_pb2.OpenDraftSession(
            request_id="r", teacher=fingerprint, prompt_token_ids=PROMPT, drafter="standalone", max_budget=budget
        )
        await call.write(draft_pb2.ProposeRequest(epoch=1, open=opening))
        await call.read()
        for number in range(1, 5):
            message = draft_pb2.ProposeTree(
                round=number, committed_length=len(PROMPT) + number - 1, appended_token_ids=[number], budget=budget
            )
            if stale:
                for old in ({"epoch": 9}, {"committed_length": 1}, *([{"round": number - 2}] if number > 2 else [])):
                    late = draft_pb2.ProposeTree()
                    late.CopyFrom(message)
                    for name, value in old.items():
                        if name != "epoch":
                            setattr(late, name, value)
                    await call.write(draft_pb2.ProposeRequest(epoch=old.get("epoch", 1), propose=late))
                    assert (await call.read()).HasField("rejection")
            await call.write(draft_pb2.ProposeRequest(epoch=1, propose=message))
            found.append((await call.read()).proposal.tree.token_ids)
        call.cancel()
        return found

    async with (
        running(DraftService(every_drafter)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        assert await trees(stub, stale=True) == await trees(stub, stale=False)


async def test_proposals_of_an_old_epoch_or_round_are_not_taken_for_the_one_asked_for(scripted_draft: System) -> None:
    """Each of them holds a tree that would be wrong here; the one asked for comes last."""
    plain = await scripted_draft.ask(PROMPT, drafter="none", max_tokens=12)
    known = scripted_draft.knows(PROMPT, plain.token_ids, 3)
    good = known.chain(3)

    def plan(asked: Asked) -> Any:
        tree = good(asked)
        wrong = TokenTree.build([asked.sequence[-1], 1, 2], [0, 0, 1])
        stale = [proposal(asked, wrong, epoch=asked.epoch + 1), proposal(asked, wrong, round=asked.round - 1)]
        return [*stale, proposal(asked, wrong, round=asked.round + 1), proposal(asked, tree)]

    scripted_draft.scripted.plan = plan
    answer = await scripted_draft.ask(PROMPT, max_tokens=12, budget=(3, 3))
    assert_same_answer(answer, plain)
    assert answer.speculation.accepted == answer.speculation.drafted > 0
    assert answer.speculation.fallback_rounds == 0
