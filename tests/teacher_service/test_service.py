"""The story of a session over real gRPC, on the fake engine."""

import grpc
import numpy as np
import pytest

from eagle_pangu.speculation.buckets import SeenShapes
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_features
from protos.v1 import model_pb2, teacher_pb2, tree_pb2
from tests.teacher_service.fakes import (
    FEATURE_WIDTH,
    MARGIN,
    VOCAB_SIZE,
    FakeEngine,
    Gate,
    answer,
    feature_row,
    half_right,
    root_only,
)
from tests.teacher_service.peer import serving

PROMPT = [11, 5, 80, 2, 41, 7]
P = len(PROMPT)
FIRST = answer(PROMPT, 1)[0]


async def test_the_model_and_the_tokenizer_are_described():
    engine = FakeEngine()
    async with serving(engine) as served:
        model = await served.stub.GetModel(teacher_pb2.GetModelRequest())
        assert model.fingerprint.model == "fake"
        assert model.fingerprint.vocab_size == VOCAB_SIZE
        assert list(model.fingerprint.eos_token_ids) == [3, 7]
        assert model.fingerprint.feature_width == FEATURE_WIDTH
        assert model.numerics == model_pb2.TeacherNumerics(
            dtype="float32", policy="bitwise", mode="reference", attention="blocked"
        )
        assert (model.slots, model.free_slots, model.slot_capacity) == (2, 2, 100)
        assert (model.max_budget.rows, model.max_budget.depth) == (8, 4)
        tokenizer = await served.stub.GetTokenizer(teacher_pb2.GetTokenizerRequest())
        assert tokenizer.tokenizer_json == engine.checkpoint.tokenizer.json
        assert tokenizer.chat_template == "{{ messages }}"
        assert tokenizer.special_tokens == {"eos_token": "<e>"}


async def test_a_session_opens_prefills_verifies_and_ends():
    async with serving(FakeEngine()) as served:
        session = served.session()
        prefilled = await session.open(PROMPT)
        assert session.opened.fingerprint == served.fingerprint
        assert session.opened.numerics.policy == "bitwise"
        assert (prefilled.next_token_id, prefilled.committed_length, prefilled.margin) == (FIRST, P, MARGIN)
        assert session.features == []
        tree = half_right([*PROMPT, FIRST])
        first = await session.verdict(1, P, 0, tree)
        assert list(first.accepted_rows) == [2, 3]
        assert list(first.margins) == [MARGIN] * 3
        assert not first.HasField("features")
        second = await session.verdict(2, P + 3, 2, TokenTree.root_only(first.next_token_id))
        assert second.next_token_id == answer(PROMPT, 5)[-1]
        assert served.service.slots.in_use == 1
        assert await session.close() is grpc.StatusCode.OK
        await served.service.slots.idle()


@pytest.mark.parametrize("draft", [root_only, half_right])
@pytest.mark.parametrize("chunk", [1, 4, 100])
async def test_an_answer_is_the_teachers_own_for_any_draft_and_any_chunking(draft, chunk):
    async with serving(FakeEngine(), prefill_chunk=chunk) as served:
        session = served.session()
        assert await session.decode(PROMPT, 30, draft) == answer(PROMPT, 30)
        assert await session.close() is grpc.StatusCode.OK


async def test_a_session_that_opens_with_an_empty_budget_decodes_teacher_only_and_refuses_a_drafted_row():
    async with serving(FakeEngine()) as served:
        session, empty = served.session(), tree_pb2.TreeBudget(rows=0, depth=0)
        assert await session.decode(PROMPT, 2, root_only, max_budget=empty) == answer(PROMPT, 2)
        rejection = (await session.verify(2, P + 1, 0, half_right([*PROMPT, *answer(PROMPT, 2)]))).rejection
        assert rejection.field == "tree.token_ids"


async def test_a_session_reopened_from_prompt_and_answer_goes_on_with_the_same_tokens():
    async with serving(FakeEngine()) as served:
        session = served.session()
        begun = await session.decode(PROMPT, 9, half_right)
        session.call.cancel()
        reopened = served.session()
        assert await reopened.decode([*PROMPT, *begun], 9, half_right) == answer(PROMPT, 18)[9:]


async def test_features_of_the_prompt_stream_while_prefill_goes_on():
    engine = FakeEngine()
    gate = Gate(engine, "prefill 4+")
    async with serving(engine, prefill_chunk=4) as served:
        session = served.session()
        await session.send_open(PROMPT, want_features=True)
        assert (await session.read()).HasField("opened")
        early = (await session.read()).features  # the second chunk waits at the gate meanwhile
        assert (early.start, early.count) == (0, 4)
        await gate.reached()
        gate.let()
        late = (await session.read()).features
        assert (late.start, late.count) == (4, 2)
        assert (await session.read()).HasField("prefilled")
        bits = np.concatenate([decode_features(part, FEATURE_WIDTH) for part in (early, late)])
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        assert values.tolist() == [feature_row(PROMPT[: n + 1]) for n in range(P)]
        verdict = await session.verdict(1, P, 0, half_right([*PROMPT, FIRST]))
        assert (verdict.features.start, verdict.features.count) == (P, 3)


async def test_features_larger_than_a_message_travel_in_several():
    async with serving(FakeEngine(), max_message_bytes=1024 + 2 * 2 * FEATURE_WIDTH, prefill_chunk=100) as served:
        session = served.session()
        await session.open(PROMPT, want_features=True)
        assert [(part.start, part.count) for part in session.features] == [(0, 2), (2, 2), (4, 2)]


async def test_times_add_up():
    async with serving(FakeEngine()) as served:
        session = served.session()
        prefilled = await session.open(PROMPT)
        tree = half_right([*PROMPT, FIRST])
        first = await session.verdict(1, P, 0, tree)
        second = await session.verdict(2, P + 3, 2, TokenTree.root_only(first.next_token_id))
        for timings in (prefilled.timings, first.timings, second.timings):
            assert timings.forward_us > 0
            assert timings.total_us >= timings.queue_us + timings.forward_us + timings.commit_us
        assert second.timings.commit_us >= first.timings.commit_us
        repeated = await session.verdict(2, P + 3, 2, TokenTree.root_only(first.next_token_id))
        assert (repeated.timings.forward_us, repeated.timings.commit_us) == (0, 0)


async def test_a_repeated_round_gets_the_same_verdict_and_changes_nothing():
    engine = FakeEngine()
    async with serving(engine) as served:
        session = served.session()
        await session.open(PROMPT, want_features=True)
        tree = half_right([*PROMPT, FIRST])
        first = await session.verdict(1, P, 0, tree)
        calls = list(engine.calls)
        again = await session.verdict(1, P, 0, tree)
        assert engine.calls == calls
        for verdict in (first, again):
            verdict.ClearField("timings")
        assert again == first
        following = await session.verdict(2, P + 3, 2, TokenTree.root_only(first.next_token_id))
        assert following.next_token_id == answer(PROMPT, 5)[-1]


async def test_shapes_are_told_where_they_cost_something():
    engine = FakeEngine()
    async with serving(engine) as served:
        assert not (await served.stub.GetModel(teacher_pb2.GetModelRequest())).HasField("shapes")
        engine.shapes = SeenShapes(warmed=3, met_later=2)
        told = (await served.stub.GetModel(teacher_pb2.GetModelRequest())).shapes
        assert (told.warmed, told.met_later) == (3, 2)
