"""Seeded sampling by the service on a real engine: the tokens are those of plain decoding, however they came about."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from google.rpc import error_details_pb2
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.noise import gumbel
from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import sampling_pb2
from teacher_service import main
from tests.models import VOCAB_SIZE, tiny_llama
from tests.teacher_service.fakes import FakeEngine
from tests.teacher_service.peer import serving
from tests.teacher_service.test_real_engine import PROMPT, scripted

TOKENS = 16
SEED = 2**63 + 5
SAMPLING = sampling_pb2.Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.3, seed=SEED)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(directory):
    settings = TeacherSettings(model=str(directory), dtype="float32", slot_capacity=128, max_rows=8)
    return main.build_engine(settings)


@pytest.fixture(scope="module")
def oracle(model):
    """The answer by transformers' forward pass and processors, one token at a time, and our noise."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.9)]
    )
    history = list(PROMPT)
    for _ in range(TOKENS):
        ids = torch.tensor([history])
        with torch.inference_mode():
            scores = processors(ids, model(ids).logits[:, -1].float())[0]
        history.append(int((scores + torch.from_numpy(gumbel(SEED, len(history), VOCAB_SIZE))).argmax()))
    return history[len(PROMPT) :]


def alone(history: list[int]) -> TokenTree:
    return TokenTree.root_only(history[-1])


@pytest.mark.parametrize("right", [None, 0, 1, 4])
async def test_a_seed_gives_the_same_tokens_with_any_draft_and_none(engine, oracle, right):
    draft = alone if right is None else scripted(oracle, right)
    async with serving(engine, slot_capacity=128) as served:
        assert await served.session().decode(PROMPT, TOKENS, draft, sampling=SAMPLING) == oracle


async def test_another_seed_gives_other_tokens(engine, oracle):
    other = sampling_pb2.Sampling()
    other.CopyFrom(SAMPLING)
    other.seed += 1
    async with serving(engine, slot_capacity=128) as served:
        assert await served.session().decode(PROMPT, TOKENS, alone, sampling=other) != oracle


async def test_a_session_opened_again_goes_on_with_the_same_tokens(engine):
    sampling = sampling_pb2.Sampling(frequency_penalty=0.05, presence_penalty=0.02)  # greedy, so that tokens repeat
    async with serving(engine, slots=3, slot_capacity=128) as served:
        whole = await served.session().decode(PROMPT, TOKENS, alone, sampling=sampling)
        prompt, start = [*PROMPT, *whole[:6]], len(PROMPT)
        sampling.min_tokens, sampling.end_token_ids[:] = 6, [whole[6]]  # six there are, where the answer began
        rest = await served.session().decode(prompt, TOKENS - 6, alone, sampling=sampling, answer_start=start)
        assert rest == whole[6:]
        assert (await served.session().open(prompt, sampling=sampling)).next_token_id != whole[6]


async def test_min_tokens_holds_the_end_back_for_as_many_answer_tokens(engine):
    async with serving(engine, slot_capacity=128) as served:
        greedy = await served.session().decode(PROMPT, 4, alone)
        held_back = sampling_pb2.Sampling(min_tokens=3, end_token_ids=[greedy[0]])
        answer = await served.session().decode(PROMPT, 4, scripted(greedy, 4), sampling=held_back)
        assert greedy[0] not in answer[:3]


async def test_log_probabilities_are_those_of_the_raw_logits(engine, model, oracle):
    async with serving(engine, slot_capacity=128) as served:
        session = served.session()
        prefilled = await session.open(PROMPT, sampling=SAMPLING, logprobs=3)
        verdict = await session.verdict(1, len(PROMPT), 0, scripted(oracle, 4)([*PROMPT, oracle[0]]))
    assert len(verdict.accepted_rows) == 4
    found = [prefilled.logprobs, *verdict.logprobs]
    decided = oracle[:6]
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *decided[:-1]]])).logits[0, len(PROMPT) - 1 :].float()
    expected = logits.log_softmax(-1)
    assert len(found) == len(expected)
    for row, token_id, entry in zip(expected, decided, found, strict=True):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        best = row.topk(3)
        assert list(entry.top_token_ids) == best.indices.tolist()
        np.testing.assert_allclose(entry.top_logprobs, best.values.numpy(), atol=1e-3)


async def test_without_the_wish_there_are_no_log_probabilities(engine, oracle):
    async with serving(engine, slot_capacity=128) as served:
        session = served.session()
        assert not (await session.open(PROMPT)).HasField("logprobs")
        assert not (await session.verdict(1, len(PROMPT), 0, alone([session.prefilled.next_token_id]))).logprobs


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"sampling": sampling_pb2.Sampling(temperature=-1)}, "open.sampling.temperature"),
        ({"sampling": sampling_pb2.Sampling(top_p=0)}, "open.sampling.top_p"),
        ({"sampling": sampling_pb2.Sampling(end_token_ids=[0, 2**32 - 1])}, "open.sampling.end_token_ids[1]"),
        ({"answer_start": 4}, "open.answer_start"),
        ({"logprobs": 21}, "open.logprobs"),
    ],
)
async def test_bad_wishes_are_refused_by_their_field(fields, at_fault):
    async with serving(FakeEngine()) as served:
        session = served.session()
        await session.send_open([1, 2, 3], **fields)
        detail = await session.error_detail(error_details_pb2.BadRequest())
        assert [violation.field for violation in detail.field_violations] == [at_fault]
