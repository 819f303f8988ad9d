"""Log-probabilities of the prompt's own tokens, held against transformers' plain forward pass over the whole prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_pangu.serving.settings import TeacherSettings
from protos.v1 import sampling_pb2
from teacher_service import main, session
from tests.models import tiny_llama
from tests.teacher_service.fakes import FEATURE_WIDTH, FakeEngine
from tests.teacher_service.peer import PeerSession, serving
from tests.teacher_service.test_real_engine import PROMPT


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(directory):
    return main.build_engine(TeacherSettings(model=str(directory), dtype="float32", slot_capacity=128, max_rows=8))


@pytest.fixture(scope="module")
def expected(directory):
    """[len(PROMPT) - 1, vocab] of the tokens from the second one on."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, :-1].float().log_softmax(-1)


def collected(peer: PeerSession) -> list[sampling_pb2.TokenLogprobs]:
    """All of them, once it is clear that they are of consecutive tokens."""
    tokens = []
    for message in peer.prompt_logprobs:
        assert message.start == 1 + len(tokens)
        tokens += message.tokens
    return tokens


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("chunk", [1, 5, 11, 100])
async def test_each_prompt_token_but_the_first_has_those_of_a_plain_forward_pass(engine, expected, chunk, top):
    processed = sampling_pb2.Sampling(temperature=0.7, repetition_penalty=1.5, seed=1)  # which they come before
    async with serving(engine, prefill_chunk=chunk, slot_capacity=128) as served:
        peer = served.session()
        await peer.open(PROMPT, prompt_logprobs=top, sampling=processed)
    tokens = collected(peer)
    assert len(tokens) == len(PROMPT) - 1
    for row, token_id, entry in zip(expected, PROMPT[1:], tokens, strict=True):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        best = row.topk(top)
        assert list(entry.top_token_ids) == best.indices.tolist()
        np.testing.assert_allclose(entry.top_logprobs, best.values.numpy(), atol=1e-3)


async def test_they_go_out_as_chunks_are_read_and_before_the_first_token():
    async with serving(FakeEngine(), prefill_chunk=4) as served:
        peer = served.session()
        await peer.send_open([1, 2, 3, 4, 5, 6], prompt_logprobs=2, want_features=True)
        kinds = [(await peer.read()).WhichOneof("message") for _ in range(6)]
        assert kinds == ["opened", *["features", "prompt_logprobs"] * 2, "prefilled"]


@pytest.mark.parametrize("chunk", [4, 5])
async def test_the_last_row_of_the_prompt_says_nothing_of_the_prompt(chunk):
    async with serving(FakeEngine(), prefill_chunk=chunk) as served:
        one, five = served.session(), served.session()
        await one.open([7], prompt_logprobs=2)
        assert one.prompt_logprobs == []
        await five.open([7, 1, 2, 3, 4], prompt_logprobs=2)
        assert [len(message.tokens) for message in five.prompt_logprobs] == [4]


async def test_tokens_that_are_answer_already_have_none():
    async with serving(FakeEngine(), prefill_chunk=4, slots=4) as served:
        for answer_start, lengths in ((6, [4, 1]), (5, [4]), (3, [2]), (1, []), (0, [])):
            peer = served.session()
            await peer.open([1, 2, 3, 4, 5, 6], prompt_logprobs=1, answer_start=answer_start)
            assert [len(message.tokens) for message in peer.prompt_logprobs] == lengths
            await peer.close()


async def test_a_session_that_asks_for_none_gets_none_and_the_answer_is_the_same(engine):
    async with serving(engine, slots=3, slot_capacity=128) as served:
        asking, silent = served.session(), served.session()
        first = await silent.open(PROMPT)
        second = await asking.open(PROMPT, prompt_logprobs=20)
        assert silent.prompt_logprobs == []
        assert (first.next_token_id, first.margin) == (second.next_token_id, second.margin)
        assert second.cached_tokens == 0
        assert (await served.session().open([*PROMPT, 1])).cached_tokens == len(PROMPT)


async def test_more_than_a_message_holds_travel_in_several():
    limit = 1024 + 2 * 250 + 2 * FEATURE_WIDTH
    async with serving(FakeEngine(), max_message_bytes=limit, prefill_chunk=100) as served:
        peer = served.session()
        await peer.open(list(range(1, 12)), prompt_logprobs=20)
    assert len(collected(peer)) == 10
    assert len(peer.prompt_logprobs) > 1
    assert max(message.ByteSize() for message in peer.prompt_logprobs) <= limit


async def test_a_large_vocabulary_is_read_in_smaller_chunks_and_gives_the_same(engine, expected, monkeypatch):
    monkeypatch.setattr(session, "PROMPT_LOGITS_BYTES", 3 * 4 * engine.checkpoint.vocab_size)
    async with serving(engine, slot_capacity=128, prefill_chunk=100) as served:
        peer, plain = served.session(), served.session()
        await peer.open(PROMPT, prompt_logprobs=0)
        assert [message.start for message in peer.prompt_logprobs] == [1, 4, 7, 10]
        await plain.open([9, *PROMPT], want_features=True)
        assert len(plain.features) == 1  # others keep the chunk that is configured
    found = [entry.logprob for entry in collected(peer)]
    np.testing.assert_allclose(found, expected[torch.arange(11), PROMPT[1:]], atol=1e-3)
