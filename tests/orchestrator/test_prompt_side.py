"""What an answer tells of its prompt: its text, its ids, its log-probabilities, and how much of it was cached."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from protos.v1 import generation_pb2, teacher_pb2
from tests.orchestrator.conftest import Stack, options, stack
from tests.orchestrator.scripted import EOS, ScriptedTeacher, ids_of, logprobs_of, saying
from tests.orchestrator.test_teacher_faults import EXPECTED, PROMPT, TOKENS, losing

START = 256  # <|im_start|>


def text(response: generation_pb2.GenerateResponse) -> list[str]:
    return [response.text, *(answer.text for answer in response.further_answers)]


async def test_an_echoed_prompt_begins_the_text_of_every_answer_and_its_ids_come_back() -> None:
    said = "日本 é!"
    async with stack(ScriptedTeacher(saying(len(PROMPT), [*ids_of(said), EOS]))) as each:
        for n in (1, 3):
            whole, parts = await each.generate(n=n, echo=True), await each.stream(n=n, echo=True)
            assert text(whole) == [f"prompt{said}"] * n
            assert list(whole.prompt_token_ids) == list(parts[0].prompt_token_ids) == PROMPT
            assert len(whole.prompt_tokens) == len(PROMPT)
            assert b"".join(whole.prompt_tokens) == b"".join(parts[0].prompt_tokens) == b"prompt"
            assert not any(part.prompt_token_ids or part.prompt_tokens for part in parts[1:])
            for index in range(n):
                mine = [part.text for part in parts if part.index == index]
                assert mine[0].startswith("prompt")
                assert "".join(mine) == f"prompt{said}"
        plain = await each.generate()
        assert (plain.text, list(plain.prompt_token_ids)) == (said, [])


async def test_an_echo_adds_no_ids_and_is_not_searched_for_stop_strings() -> None:
    async with stack(ScriptedTeacher(saying(len(PROMPT), [*ids_of("two prompt, romp"), EOS]))) as each:
        for stop, said in (("romp", "two p"), ("pttwo", "two prompt, romp")):
            response = await each.generate(echo=True, stop=[stop])
            assert response.text == f"prompt{said}"
            assert list(response.token_ids) == list((await each.generate(stop=[stop])).token_ids)


async def test_an_echo_leaves_out_special_tokens_and_a_character_cut_through(usual: Stack) -> None:
    usual.teacher.next_token = lambda history: EOS
    given = [START, *ids_of("a日"), EOS, *ids_of("b"), *ids_of("😀")[:3], EOS]
    response = await usual.generate(prompt_token_ids=generation_pb2.TokenIds(ids=given), echo=True)
    assert response.text == "a日b"
    assert list(response.prompt_token_ids) == given


@pytest.mark.parametrize("top", [0, 2, 20])
async def test_log_probabilities_of_the_prompt_come_once_and_in_place(usual: Stack, top: int) -> None:
    expected = [logprobs_of(PROMPT[:at], PROMPT[at], top) for at in range(1, len(PROMPT))]
    whole = await usual.generate(max_tokens=5, prompt_logprobs=top, n=3)
    parts = await usual.stream(max_tokens=5, prompt_logprobs=top, n=3)
    for given in (whole.prompt_logprobs, parts[0].prompt_logprobs):
        assert [(entry.logprob, list(entry.top_token_ids), list(entry.top_logprobs)) for entry in given] == [
            (entry.logprob, list(entry.top_token_ids), list(entry.top_logprobs)) for entry in expected
        ]
    assert not any(part.prompt_logprobs for part in parts[1:])
    asked = [
        record.open.prompt_logprobs if record.open.HasField("prompt_logprobs") else None for record in sessions(usual)
    ]
    assert sorted(asked, key=str) == sorted([top, None, None] * 2, key=str)


def sessions(each: Stack) -> list[Any]:
    return each.teacher.sessions


async def test_a_prompt_of_one_token_has_none(usual: Stack) -> None:
    assert list((await usual.generate(prompt="x", max_tokens=3, prompt_logprobs=4)).prompt_logprobs) == []


async def test_they_are_collected_anew_when_the_first_session_is_lost_before_its_first_token(usual: Stack) -> None:
    lost: list[bool] = []
    real = usual.teacher.next_token

    def lose_first(history: Any) -> int:
        if not lost:
            lost.append(True)
            raise RuntimeError("after the prompt's log-probabilities, before the first token")
        return real(history)

    usual.teacher.next_token = lose_first
    response = await usual.generate(max_tokens=5, prompt_logprobs=1, drafter="none")
    assert len(response.prompt_logprobs) == len(PROMPT) - 1
    assert len(sessions(usual)) == 2


async def test_a_session_opened_anew_is_not_asked_for_them_and_keeps_its_priority(usual: Stack) -> None:
    usual.teacher.on_verify = losing({4})
    response = await usual.generate(max_tokens=TOKENS, prompt_logprobs=1, priority=-7)
    assert list(response.token_ids) == EXPECTED
    assert len(response.prompt_logprobs) == len(PROMPT) - 1
    first, second = (record.open for record in sessions(usual))
    assert first.HasField("prompt_logprobs")
    assert not second.HasField("prompt_logprobs")
    assert (first.priority, second.priority) == (-7, -7)


@pytest.mark.parametrize("messages", [[], [(1, 4)], [(1, 6)], [(2, 5)], [(1, 2), (4, 3)], [(1, 3), (1, 2)]])
async def test_a_teacher_that_tells_them_out_of_place_is_a_fault_and_not_an_answer(
    usual: Stack, messages: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.orchestrator.scripted.teacher.prompt_logprobs_of",
        lambda history, top: [
            teacher_pb2.PromptLogprobs(start=start, tokens=[logprobs_of([], 0, top)] * count)
            for start, count in messages
        ],
    )
    request = generation_pb2.GenerateRequest(options=options(max_tokens=5, prompt_logprobs=0))
    with pytest.raises(grpc.aio.AioRpcError) as fault:
        await usual.stub.Generate(request)
    assert fault.value.code() == grpc.StatusCode.INTERNAL
    await usual.idle()


async def test_priority_reaches_the_sessions_of_all_answers(usual: Stack) -> None:
    await usual.generate(max_tokens=3, n=2, priority=100)
    await usual.generate(max_tokens=3)
    assert [record.open.priority for record in sessions(usual)] == [100, 100, 0]


async def test_cached_tokens_are_those_of_the_first_session_of_answer_0(usual: Stack) -> None:
    assert (await usual.generate(max_tokens=3)).usage.cached_prompt_tokens == 0
    usual.teacher.on_verify = losing({6})
    prompt = "prompt and more"
    again = await usual.generate(prompt=prompt, max_tokens=TOKENS)
    assert len(sessions(usual)) == 3
    assert again.usage.cached_prompt_tokens == len(PROMPT)
    parts = await usual.stream(prompt=prompt, max_tokens=3, n=2)
    assert parts[-1].usage.cached_prompt_tokens == len(ids_of(prompt)) - 1
    assert (await usual.generate(max_tokens=3, prompt_logprobs=0)).usage.cached_prompt_tokens == 0
