"""What of a request reaches the orchestrator, and what is refused before it does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from eagle_pangu.openai_api.errors import ApiError
from eagle_pangu.openai_api.options import chat_question, completion_question
from eagle_pangu.openai_api.requests import ChatRequest, CompletionRequest, read
from protos.v1 import generation_pb2

SAYS_HI = [{"role": "user", "content": "hi"}]

HONOURED: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.25,
    "n": 2,
    "stop": ["a", "b"],
    "seed": 2**64 - 1,
    "frequency_penalty": 1.5,
    "presence_penalty": -1.5,
    "logit_bias": {"0": -100, "4294967295": 2.5},
    "top_k": 3,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "min_tokens": 2,
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "bad_words": [[1, 2], [3]],
    "allowed_token_ids": [6, 7],
    "include_stop": True,
    "drafter": "ngram",
    "priority": -100,
    "stream_tokens": True,
}
EXPECTED = generation_pb2.GenerationOptions(
    request_id="r",
    **{name: value for name, value in HONOURED.items() if name not in ("logit_bias", "bad_words")},
    logit_bias={0: -100.0, 4294967295: 2.5},
    bad_words=[{"token_ids": [1, 2]}, {"token_ids": [3]}],
)
NOT_SAMPLED = {"model", "stream", "stream_options", "user"}


def completion(**fields: Any) -> generation_pb2.GenerationOptions:
    request = read(CompletionRequest, json.dumps({"model": "m", "prompt": "hi", **fields}).encode())
    return completion_question(request, "r").options


def chat(**fields: Any) -> generation_pb2.GenerationOptions:
    request = read(ChatRequest, json.dumps({"model": "m", "messages": SAYS_HI, **fields}).encode())
    return chat_question(request, "r").options


def test_every_field_of_generation_reaches_the_options() -> None:
    expected = generation_pb2.GenerationOptions(prompt="hi")
    expected.MergeFrom(EXPECTED)
    assert completion(**HONOURED, stream=True) == expected
    expected = generation_pb2.GenerationOptions(chat=generation_pb2.ChatMessages(messages=SAYS_HI))
    expected.MergeFrom(EXPECTED)
    assert chat(**HONOURED, stream=True) == expected


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (CompletionRequest, {"prompt", "logprobs", "echo"}),
        (ChatRequest, {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}),
    ],
)
def test_no_field_is_taken_that_these_tests_do_not_know(kind: type[BaseModel], others: set[str]) -> None:
    assert kind.model_fields.keys() == HONOURED.keys() | NOT_SAMPLED | others


def test_every_field_of_the_contract_has_a_name_here() -> None:
    ours = {field.name for field in generation_pb2.GenerationOptions.DESCRIPTOR.fields}
    here = {"request_id", "prompt", "prompt_token_ids", "chat", "logprobs", "prompt_logprobs", "echo"}
    assert ours - HONOURED.keys() - here == {"budget", "return_margins"}, "these two are gRPC's alone"


def test_left_out_and_null_are_the_same_and_temperature_is_then_1() -> None:
    nulls = dict.fromkeys([*HONOURED, "stream", "stream_options", "user", "logprobs"])
    expected = generation_pb2.GenerationOptions(request_id="r", prompt="hi", temperature=1.0)
    assert completion() == completion(**nulls, echo=None) == expected
    assert chat(**nulls, max_completion_tokens=None, top_logprobs=None) == chat()
    assert completion(temperature=0).temperature == 0


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("ab", "ab", []), (["ab"], "ab", []), ([1, 2], "", [1, 2]), ([[1, 2]], "", [1, 2]), ([1], "", [1])],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_one_of_them(prompt: Any, text: str, token_ids: list[int]) -> None:
    options = completion(prompt=prompt)
    assert (options.prompt, list(options.prompt_token_ids.ids)) == (text, token_ids)


def test_stop_may_be_one_string() -> None:
    assert completion(stop="end").stop == ["end"]


def test_content_may_be_parts_of_text_which_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]
    messages = chat(messages=[{"role": "system", "content": parts}, *SAYS_HI]).chat.messages
    assert [(message.role, message.content) for message in messages] == [("system", "a\nb"), ("user", "hi")]


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=9).max_tokens == 9


def test_log_probabilities_are_asked_for_in_each_routes_own_way() -> None:
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=0).HasField("logprobs")
    assert not completion(logprobs=3).HasField("prompt_logprobs")
    echoed = completion(logprobs=3, echo=True)
    assert (echoed.logprobs, echoed.prompt_logprobs, echoed.echo) == (3, 3, True)
    assert not completion(echo=True).HasField("prompt_logprobs")
    assert chat(logprobs=True).HasField("logprobs")
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert not chat(logprobs=False).HasField("logprobs")


NUMBERS = [
    field.name
    for field in generation_pb2.GenerationOptions.DESCRIPTOR.fields
    if field.type == field.TYPE_FLOAT and not field.is_repeated
]


def test_the_smallest_numbers_of_the_contract_are_no_0() -> None:
    least = 2.0**-149
    for name in NUMBERS:
        assert getattr(completion(**{name: least}), name) == least
        assert getattr(completion(**{name: np.nextafter(2.0**-150, 1)}), name) == least
        assert getattr(completion(**{name: -0.0}), name) == 0


UNKNOWN = "unknown_parameter"
INVALID = "invalid_value"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        *[({name: 1}, name, UNKNOWN) for name in ("tools", "response_format", "best_of", "suffix", "messages")],
        ({"stream_options": {"include_obfuscation": False}}, "stream_options.include_obfuscation", UNKNOWN),
        ({"stream_options": {"include_usage": True}}, "stream_options", INVALID),
        ({"max_tokens": "5"}, "max_tokens", INVALID),
        ({"max_tokens": 5.5}, "max_tokens", INVALID),
        ({"max_tokens": True}, "max_tokens", INVALID),
        ({"max_tokens": -1}, "max_tokens", INVALID),
        ({"max_tokens": 2**32}, "max_tokens", INVALID),
        ({"temperature": "hot"}, "temperature", INVALID),
        ({"temperature": float("nan")}, "temperature", INVALID),
        ({"temperature": float("inf")}, "temperature", INVALID),
        *[({name: 1e-300}, name, INVALID) for name in NUMBERS],
        ({"min_p": 2.0**-150}, "min_p", INVALID),
        ({"logit_bias": {"3": -1e-300}}, "logit_bias.3", INVALID),
        ({"stream_tokens": True}, "stream_tokens", INVALID),
        ({"stream_tokens": True, "stream": False}, "stream_tokens", INVALID),
        ({"seed": -1}, "seed", INVALID),
        ({"seed": 2**64}, "seed", INVALID),
        ({"priority": 2**31}, "priority", INVALID),
        ({"stream": 1}, "stream", INVALID),
        ({"user": 1}, "user", INVALID),
        ({"logprobs": True}, "logprobs", INVALID),
        ({"prompt": None}, "prompt", INVALID),
        ({"prompt": []}, "prompt", INVALID),
        ({"prompt": ["a", "b"]}, "prompt", INVALID),
        ({"prompt": [[1], [2]]}, "prompt", INVALID),
        ({"prompt": [[]]}, "prompt", INVALID),
        ({"prompt": [True]}, "prompt", INVALID),
        ({"prompt": [-1]}, "prompt", INVALID),
        ({"prompt": [2**32]}, "prompt", INVALID),
        ({"prompt": [1, "a"]}, "prompt", INVALID),
        ({"stop": 1}, "stop", INVALID),
        ({"stop": ["a", None]}, "stop", INVALID),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", INVALID),
        ({"logit_bias": {"01": 1}}, "logit_bias.01", INVALID),
        ({"logit_bias": {"²": 1}}, "logit_bias.²", INVALID),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias.4294967296", INVALID),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1", INVALID),
        ({"bad_words": ["word"]}, "bad_words[0]", INVALID),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", INVALID),
        ({"model": 1}, "model", INVALID),
    ],
)
def test_a_bad_completion_request_names_its_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.status == 400
    assert caught.value.error["type"] == "invalid_request_error"
    assert (caught.value.error["param"], caught.value.error["code"]) == (param, code)
    assert caught.value.error["message"].startswith(f"{param}: "), caught.value.error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        *[({name: 1}, name, UNKNOWN) for name in ("tools", "tool_choice", "functions", "store", "prompt", "echo")],
        ({"messages": []}, "messages", INVALID),
        ({"messages": [{"role": "developer", "content": "a"}]}, "messages[0].role", INVALID),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", INVALID),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", INVALID),
        ({"messages": [*SAYS_HI, {"role": "user", "content": "a", "name": "b"}]}, "messages[1].name", UNKNOWN),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", INVALID),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages[0].content",
            INVALID,
        ),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", INVALID),
        ({"logprobs": 1}, "logprobs", INVALID),
        ({"top_logprobs": 1}, "top_logprobs", INVALID),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs", INVALID),
    ],
)
def test_a_bad_chat_request_names_its_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.error["param"], caught.value.error["code"]) == (400, param, code)


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ApiError) as caught:
        completion(top_k=-1, tools=[], stop=3)
    message = caught.value.error["message"]
    assert "stop: expected a string or a list of strings, got 3" in message
    assert "top_k: " in message
    assert "tools: unknown or not supported here" in message


def test_a_long_value_is_not_quoted_whole() -> None:
    with pytest.raises(ApiError) as caught:
        completion(max_tokens="x" * 10_000)
    assert len(caught.value.error["message"]) < 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"a"', b'{"model": "\xff"}', b'{"model": "\\ud800"}'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(CompletionRequest, body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("path", "completion_name", "chat_name"),
    [
        ("options.prompt_token_ids.ids[3]", "prompt[3]", None),
        ("options.prompt", "prompt", None),
        ("options.chat.messages[1].role", None, "messages[1].role"),
        ("options.chat", None, "messages"),
        ("options.input", "prompt", "messages"),
        ("options.logprobs", "logprobs", "top_logprobs"),
        ("options.prompt_logprobs", "logprobs", None),
        ("options.max_tokens", "max_tokens", "max_completion_tokens"),
        ("options.request_id", "x-request-id", "x-request-id"),
        ("options.stop[2]", "stop[2]", "stop[2]"),
        ("options.logit_bias", "logit_bias", "logit_bias"),
    ],
)
def test_a_field_of_the_contract_is_named_as_over_http(
    path: str, completion_name: str | None, chat_name: str | None
) -> None:
    if completion_name:
        request = read(CompletionRequest, b'{"model": "m", "prompt": "hi"}')
        assert completion_question(request, "r").http_field(path) == completion_name
    if chat_name:
        asked = {"model": "m", "messages": SAYS_HI, "max_completion_tokens": 3}
        assert chat_question(read(ChatRequest, json.dumps(asked).encode()), "r").http_field(path) == chat_name
