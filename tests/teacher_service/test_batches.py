"""Sessions that share passes, over real gRPC: their answers, their failures, and what is told of it."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs

from eagle_pangu.serving.bootstrap import StartError
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import teacher_pb2, tree_pb2
from teacher_service import main
from teacher_service.advice import Advice
from tests.models import VOCAB_SIZE, tiny_llama
from tests.teacher_service.fakes import FakeEngine, Gate, answer, half_right, root_only
from tests.teacher_service.peer import Served, serving, until

PROMPT = [11, 5, 80, 2, 41, 7]
P = len(PROMPT)
FIRST, SECOND = answer(PROMPT, 2)


async def model(served: Served) -> teacher_pb2.GetModelResponse:
    return await served.stub.GetModel(teacher_pb2.GetModelRequest())


@pytest.mark.parametrize("step_rows", [1, 7, 256])
async def test_many_sessions_at_once_get_the_teachers_own_answers_and_share_passes(step_rows):
    engine = FakeEngine()
    prompts = [[n + 1] * (3 * n + 1) for n in range(6)]
    async with serving(engine, slots=6, step_rows=step_rows) as served:
        sessions = [served.session() for _ in prompts]
        answers = await asyncio.gather(
            *(
                session.decode(prompt, 12, half_right if n % 2 else root_only)
                for n, (session, prompt) in enumerate(zip(sessions, prompts, strict=True))
            )
        )
        assert answers == [answer(prompt, 12) for prompt in prompts]
        batches = (await model(served)).batches
        assert batches.batching == "ragged"
        assert batches.passes == len(engine.passes)
        assert batches.sessions == sum(engine.passes)
        assert batches.rows == batches.computed_rows > 6 * 12 / 3
        assert batches.longest_wait_us > 0
        assert batches.realign_us == 0
        if step_rows == 256:
            assert batches.passes < batches.sessions


async def two_in_one_pass(served: Served, gate: Gate, **fields):
    """Two sessions after their prompts, whose first trees are in one pass, which waits at the gate; the gate holds
    passes of a third session as well."""
    sessions = [served.session() for _ in range(3)]
    for session, prompt in zip(sessions, (PROMPT, [1, 2, 3], [9]), strict=True):
        await session.open(prompt, **fields)
    await sessions[2].send_verify(1, 1, 0, TokenTree.root_only(answer([9], 1)[0]))
    await gate.reached()
    for session, prompt in zip(sessions, (PROMPT, [1, 2, 3]), strict=False):
        await session.send_verify(1, len(prompt), 0, half_right([*prompt, answer(prompt, 1)[0]]))
    await until(lambda: served.service.worker.heartbeat().waiting == 2)
    return sessions


async def test_a_verdict_says_whom_it_shared_the_pass_with():
    engine = FakeEngine()
    gate = Gate(engine, "verify 1 of 9")
    async with serving(engine, slots=3) as served:
        one, two, third = await two_in_one_pass(served, gate)
        gate.let()
        for session in (one, two):
            timings = (await session.read()).verdict.timings
            assert (timings.batch_sessions, timings.batch_rows, timings.realign_us) == (2, 10, 0)
            assert timings.queue_us > 0
            assert timings.queue_us + timings.forward_us + timings.commit_us <= timings.total_us
        assert (await third.read()).verdict.timings.batch_sessions == 1


async def test_a_session_that_fails_a_shared_pass_ends_alone():
    engine = FakeEngine()
    gate = Gate(engine, "verify 1 of 9")
    async with serving(engine, slots=3) as served:
        with capture_logs() as lines:
            one, two, third = await two_in_one_pass(served, gate)
            wait = engine.before

            def fail(call: str) -> None:
                wait(call)
                if call == "verify 5 of 1":
                    raise RuntimeError("in the pass")

            engine.before = fail
            gate.let()
            assert (await two.status())[0] is grpc.StatusCode.INTERNAL
            verdict = (await one.read()).verdict
            assert verdict.next_token_id == answer(PROMPT, 4)[-1]
            assert verdict.timings.batch_sessions == 1
            tree = TokenTree.root_only(verdict.next_token_id)
            assert (await one.verdict(2, P + 3, 2, tree)).next_token_id == answer(PROMPT, 5)[-1]
            assert (await third.read()).HasField("verdict")
        assert any(line["event"].startswith("a shared pass failed") for line in lines)
        await until(lambda: served.service.slots.in_use == 2)


async def test_a_session_cancelled_while_it_waits_for_a_shared_pass_is_not_in_it():
    engine = FakeEngine()
    gate = Gate(engine, "verify 1 of 9")
    async with serving(engine, slots=3) as served:
        with capture_logs() as lines:
            one, two, _ = await two_in_one_pass(served, gate)
            two.call.cancel()
            await until(lambda: any(line["event"] == "session ended" for line in lines))
        gate.let()
        assert (await one.read()).verdict.timings.batch_sessions == 1
        assert "verify 5 of 1" not in engine.calls
        await until(lambda: served.service.slots.in_use == 2)


async def test_what_is_advised_goes_out_with_every_answer_and_only_where_it_is_wanted(monkeypatch):
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(Advice, "rows", lambda self, sessions, asked: told.append((sessions, asked)) or 3)
    async with serving(FakeEngine()) as served:
        one, two = served.session(), served.session()
        assert (await one.open(PROMPT)).advised_rows == 3
        assert (await one.verdict(1, P, 0, TokenTree.root_only(FIRST))).advised_rows == 3
        await two.open([1, 2, 3], max_budget=tree_pb2.TreeBudget(rows=5, depth=4))
        assert told == [(1, 8), (1, 8), (2, 5)]
    async with serving(FakeEngine(), advise_rows=False) as served:
        session = served.session()
        assert not (await session.open(PROMPT)).HasField("advised_rows")
        assert not (await session.verdict(1, P, 0, TokenTree.root_only(FIRST))).HasField("advised_rows")


async def test_a_session_that_ended_no_longer_counts_among_those_that_share_the_model():
    async with serving(FakeEngine()) as served:
        one, two = served.session(), served.session()
        for session in (one, two):
            await session.open(PROMPT)
            await session.verdict(1, P, 0, TokenTree.root_only(FIRST))
        assert served.service.scheduler.sessions == 2
        await two.close()
        await until(lambda: served.service.slots.in_use == 1)
        await one.verdict(2, P + 1, 0, TokenTree.root_only(SECOND))
        assert served.service.scheduler.sessions == 1


async def test_a_session_waits_for_kv_though_a_slot_is_free():
    async with serving(FakeEngine(), slots=4, kv_tokens=128) as served:
        one, two = served.session(), served.session()
        await one.open(PROMPT)  # 6 + 40 + 8 tokens: one block
        found = await model(served)
        assert (found.slots, found.free_slots, found.kv_tokens, found.free_kv_tokens) == (4, 3, 128, 64)
        await two.send_open([5] * 30)  # two blocks
        await until(lambda: served.service.slots.waiting == 1)
        await one.close()
        await two.read_prefilled()
        assert (await model(served)).free_kv_tokens == 0
        await two.close()
        await served.service.slots.idle()
        assert (await model(served)).free_kv_tokens == 128


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "teacher.slots = 2 times teacher.slot_capacity = 100 tokens .* 132 MiB .* 128 MiB .* teacher.kv_tokens"),
        # The rectangle of two sessions, as long as the longest may be and a quarter more.
        ({"batching": "eqspec"}, "teacher.slots = 2 times .* 136 MiB .* 128 MiB"),
        ({"kv_tokens": 1000}, "teacher.kv_tokens = 1024 and teacher.prefix_cache_tokens = 8192 need 144 MiB"),
    ],
)
async def test_kv_that_does_not_fit_the_device_stops_the_start(changes, named):
    engine = FakeEngine()
    engine.free_bytes = 2**14 * 8192
    with pytest.raises(StartError, match=named):
        async with serving(engine, **changes):
            pass
    async with serving(engine, prefix_cache_tokens=0, **changes):
        pass


async def test_every_way_of_sharing_passes_gives_the_same_answers(tmp_path):
    directory = str(tiny_llama(tmp_path))
    prompts = [[n + 1] * (3 * n + 1) for n in range(4)]

    def bushy(history: list[int]) -> TokenTree:
        first = (history[-1] + 1) % VOCAB_SIZE
        return TokenTree.build([history[-1], first, (first + 1) % VOCAB_SIZE, first], [0, 0, 0, 1])

    async def answers(batching: str) -> list[list[int]]:
        settings = {"batching": batching, "slots": 4, "group_size": 3, "window": 4, "slot_capacity": 128, "threads": 1}
        engine = main.build_engine(TeacherSettings(model=directory, dtype="float32", **settings))
        if batching != "ragged":
            assert engine.numerics.policy == "free"
            assert batching in engine.numerics.degraded_reason
        async with serving(engine, **settings) as served:
            found = await asyncio.gather(*(served.session().decode(prompt, 10, bushy) for prompt in prompts))
            batches = (await model(served)).batches
            assert batches.batching == batching
            assert batches.passes < batches.sessions
            assert (batches.realign_us > 0) == (batching != "ragged")
        return found

    ragged = await answers("ragged")
    assert await answers("eqspec") == ragged
    assert await answers("exspec") == ragged


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kv_tokens": 4000}, r"kv_tokens: expected 0, or at least slot_capacity \(4096\), got 4000"),
        ({"batching": "exspec", "window": 7}, r"window: expected at least group_size \(8\), got 7"),
        ({"mode": "reference", "attention": "sdpa"}, "attention: expected auto or eager with mode = reference"),
        ({"batching": "rectangular"}, "batching"),
        ({"step_rows": 0}, "step_rows"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(values, named):
    with pytest.raises(ValidationError, match=named):
        TeacherSettings(**values)


@pytest.mark.parametrize(("name", "value"), [("batching", "eqspec"), ("attention", "sdpa")])
def test_bitwise_numerics_cannot_be_asked_of_what_keeps_no_bits(name, value):
    with pytest.raises(StartError, match=f"teacher.numerics = bitwise .* teacher.{name} = {value}"):
        main._load(TeacherSettings(numerics="bitwise", **{name: value}), None, None)


@pytest.mark.parametrize(("name", "value"), [("batching", "eqspec"), ("attention", "eager")])
def test_the_default_numerics_give_way_to_what_keeps_no_bits_and_say_so(tmp_path, name, value):
    settings = TeacherSettings(model=str(tiny_llama(tmp_path)), **{name: value})
    numerics = main._load(settings, get_device("cpu"), torch.float32).numerics
    assert numerics.policy == "free"
    assert numerics.degraded_reason == f"no bitwise numerics with teacher.{name} = {value}"
    assert numerics.attention == ("eager" if name == "attention" else "sdpa")
