"""A stream of one message a token holds what the stream of one a round holds, token by token."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.rounds import Emission
from orchestrator.stops import End
from protos.v1 import generation_pb2, sampling_pb2
from tests.orchestrator.conftest import stack
from tests.orchestrator.scripted import EOS, ScriptedTeacher, ids_of, knowing, saying

PROMPT = ids_of("prompt")
TEXT = "héllo 日本 😀👩‍👩‍👧 STOP more"


@pytest.mark.parametrize("right", [0, 3, 8])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 19},  # within a character
        {"stop": ["STOP"]},
        {"stop": ["STOP"], "include_stop": True},
        {"stop": ["STOPS"]},
        {"echo": True, "n": 3},
    ],
)
async def test_messages_of_one_token_make_the_same_answer(fields: dict[str, Any], right: int) -> None:
    teacher = ScriptedTeacher(saying(len(PROMPT), [*ids_of(TEXT), EOS]))
    asked: dict[str, Any] = {"return_margins": True, "logprobs": 2, "prompt_logprobs": 0, **fields}
    async with stack(teacher, knowing(teacher.next_token, lambda number: right)) as each:
        whole = await each.generate(**asked)
        parts = await each.stream(**asked, stream_tokens=True)
    assert "\N{REPLACEMENT CHARACTER}" not in whole.text
    for index, answer in enumerate([whole, *whole.further_answers]):
        mine = [part for part in parts if part.index == index]
        assert [list(part.token_ids) for part in mine] == [[token] for token in answer.token_ids]
        assert "".join(part.text for part in mine) == answer.text
        assert [list(part.margins) for part in mine] == [[margin] for margin in answer.margins]
        assert [list(part.logprobs) for part in mine] == [[entry] for entry in answer.logprobs]
        assert [part.finish_reason for part in mine[:-1]] == [generation_pb2.FINISH_REASON_UNSPECIFIED] * (
            len(mine) - 1
        )
        assert (mine[-1].finish_reason, mine[-1].matched_stop) == (answer.finish_reason, answer.matched_stop)
        assert mine[-1].speculation.rounds == answer.speculation.rounds
    assert list(parts[0].prompt_logprobs) == list(whole.prompt_logprobs)
    assert not any(part.prompt_logprobs or part.prompt_token_ids for part in parts[1:])
    assert [part.HasField("usage") for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_each_token_has_its_own_text_where_it_makes_whole_characters() -> None:
    teacher = ScriptedTeacher(saying(len(PROMPT), [*ids_of("ab😀c"), EOS]))
    async with stack(teacher, knowing(teacher.next_token, lambda number: 8)) as each:
        parts = await each.stream(stream_tokens=True)
    assert [part.text for part in parts] == ["a", "b", "", "", "", "😀", "c", ""]


def test_an_emission_falls_into_its_tokens_whatever_it_holds() -> None:
    entries = [sampling_pb2.TokenLogprobs(logprob=-place) for place in range(2)]
    both = Emission([1, 2], ["a", "b"], [0.5, 0.25], entries, End("stop", "b"), entries[:1])
    assert both.by_token() == [
        Emission([1], ["a"], [0.5], entries[:1], None, entries[:1]),
        Emission([2], ["b"], [0.25], entries[1:], End("stop", "b"), ()),
    ]
    assert [part.logprobs for part in both._replace(logprobs=[]).by_token()] == [[], []]
