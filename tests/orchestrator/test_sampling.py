"""How tokens are to be decided reaches the teacher whole, and again when a session is opened anew."""

from __future__ import annotations

from typing import Any

import pytest

from protos.v1 import sampling_pb2
from tests.orchestrator.conftest import Stack
from tests.orchestrator.scripted import EOS, ids_of, plain, scrambled
from tests.orchestrator.test_teacher_faults import losing

PROMPT = ids_of("prompt")
EXPECTED = plain(scrambled, PROMPT, 30)


async def test_every_field_reaches_the_teacher(usual: Stack) -> None:
    response = await usual.generate(
        max_tokens=5,
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        frequency_penalty=-1,
        presence_penalty=0.5,
        logit_bias={9: -2.5, 4: 1},
        min_tokens=2,
        stop_token_ids=[5, 6],
        bad_words=[sampling_pb2.TokenSequence(token_ids=ids) for ids in ([7], [8, 9])],
        allowed_token_ids=[*range(200)],
        logprobs=3,
    )
    opening = usual.teacher.sessions[0].open
    assert opening.sampling == sampling_pb2.Sampling(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        frequency_penalty=-1,
        presence_penalty=0.5,
        logit_bias=[sampling_pb2.LogitBias(token_id=4, bias=1), sampling_pb2.LogitBias(token_id=9, bias=-2.5)],
        min_tokens=2,
        end_token_ids=[EOS, 5, 6],
        bad_words=[sampling_pb2.TokenSequence(token_ids=ids) for ids in ([7], [8, 9])],
        allowed_token_ids=[*range(200)],
    )
    assert opening.logprobs == 3
    assert not opening.HasField("answer_start")
    assert response.seed == 2**64 - 1


async def test_a_plain_request_is_plain_greedy(usual: Stack) -> None:
    response = await usual.generate(max_tokens=5)
    opening = usual.teacher.sessions[0].open
    assert (opening.sampling.temperature, opening.sampling.top_p, opening.sampling.repetition_penalty) == (0, 1, 1)
    assert not opening.HasField("logprobs")
    assert not response.HasField("seed")


async def test_without_a_seed_one_is_drawn_used_and_returned(usual: Stack) -> None:
    seeds = []
    for _ in range(2):
        whole = await usual.generate(max_tokens=5, temperature=1)
        last = (await usual.stream(max_tokens=5, temperature=1))[-1]
        seeds += [whole.seed, last.seed]
    assert [record.open.sampling.seed for record in usual.teacher.sessions] == seeds
    assert len(set(seeds)) == 4


async def test_a_session_opened_anew_keeps_the_seed_and_knows_where_the_answer_begins(usual: Stack) -> None:
    usual.teacher.on_verify = losing({4})
    await usual.generate(max_tokens=30, temperature=1, presence_penalty=1)
    first, second = (record.open for record in usual.teacher.sessions)
    assert second.sampling == first.sampling
    assert second.answer_start == len(PROMPT) < len(second.prompt_token_ids)


async def test_a_stop_token_ends_the_answer_and_stays_in_its_ids(usual: Stack) -> None:
    at = next(place for place in range(3, 30) if EXPECTED[place] not in EXPECTED[:place])
    response = await usual.generate(max_tokens=30, stop_token_ids=[EXPECTED[at]], ignore_eos=True)
    assert list(response.token_ids) == EXPECTED[: at + 1]
    assert usual.teacher.sessions[0].open.sampling.end_token_ids == [EXPECTED[at]]


@pytest.mark.parametrize("include_stop", [False, True])
async def test_the_stop_string_is_in_the_text_only_when_asked_for(usual: Stack, include_stop: bool) -> None:
    whole = (await usual.generate(max_tokens=30)).text
    stop = whole[4:6]
    cut = whole[: whole.index(stop)] + (stop if include_stop else "")
    asked: dict[str, Any] = {"max_tokens": 30, "stop": [stop], "include_stop": include_stop}
    response = await usual.generate(**asked)
    assert (response.text, response.matched_stop) == (cut, stop)
    assert "".join(part.text for part in await usual.stream(**asked)) == cut
