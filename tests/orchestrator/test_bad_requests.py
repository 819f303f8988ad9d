"""A bad request is told everything that is wrong with it, by field, and harms nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from eagle_pangu.client.client import violations_of
from protos.v1 import generation_pb2, sampling_pb2, tree_pb2
from tests.orchestrator.conftest import Stack, stack
from tests.orchestrator.scripted import ids_of, plain, scrambled

Chat = generation_pb2.ChatMessages
Said = generation_pb2.ChatMessage
Budget = tree_pb2.TreeBudget
Word = sampling_pb2.TokenSequence


async def refused(each: Stack, options: generation_pb2.GenerationOptions) -> list[str]:
    """Fields at fault; the same for both calls."""
    fields: list[list[str]] = []
    calls = (
        each.stub.Generate(generation_pb2.GenerateRequest(options=options), timeout=20),
        each.stub.GenerateStream(generation_pb2.GenerateStreamRequest(options=options), timeout=20).read(),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT, error.value
        violations = violations_of(error.value)
        assert all(violation.reason for violation in violations)
        fields.append([violation.field for violation in violations])
    assert fields[0] == fields[1]
    assert each.teacher.sessions == []
    return fields[0]


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({}, "options.input"),
        ({"prompt": ""}, "options.prompt"),
        ({"prompt": "x" * 513}, "options.prompt"),
        ({"prompt": "x" * (2**20 + 1)}, "options.prompt"),
        ({"prompt_token_ids": generation_pb2.TokenIds()}, "options.prompt_token_ids.ids"),
        ({"prompt_token_ids": generation_pb2.TokenIds(ids=[0, 257, 258])}, "options.prompt_token_ids.ids[2]"),
        ({"prompt_token_ids": generation_pb2.TokenIds(ids=[2**32 - 1])}, "options.prompt_token_ids.ids[0]"),
        ({"prompt_token_ids": generation_pb2.TokenIds(ids=[1] * 512)}, "options.prompt_token_ids.ids"),
        ({"chat": Chat()}, "options.chat.messages"),
        ({"chat": Chat(messages=[Said(role="user"), Said(role="root")])}, "options.chat.messages[1].role"),
        ({"chat": Chat(messages=[Said(role="user", content="x" * 600)])}, "options.chat"),
        ({"prompt": "x", "max_tokens": 0}, "options.max_tokens"),
        ({"prompt": "x", "max_tokens": 4097}, "options.max_tokens"),
        ({"prompt": "x", "stop": ["a"] * 17}, "options.stop"),
        ({"prompt": "x", "stop": ["a", ""]}, "options.stop[1]"),
        ({"prompt": "x", "stop": ["a" * 257]}, "options.stop[0]"),
        ({"prompt": "x", "temperature": -0.5}, "options.temperature"),
        ({"prompt": "x", "temperature": 101}, "options.temperature"),
        ({"prompt": "x", "temperature": float("nan")}, "options.temperature"),
        ({"prompt": "x", "top_p": 0}, "options.top_p"),
        ({"prompt": "x", "top_p": 1.5}, "options.top_p"),
        ({"prompt": "x", "min_p": -0.1}, "options.min_p"),
        ({"prompt": "x", "repetition_penalty": 0}, "options.repetition_penalty"),
        ({"prompt": "x", "frequency_penalty": 2.5}, "options.frequency_penalty"),
        ({"prompt": "x", "presence_penalty": float("inf")}, "options.presence_penalty"),
        ({"prompt": "x", "logit_bias": {258: 1.0}}, "options.logit_bias[0]"),
        ({"prompt": "x", "logit_bias": {3: 101.0}}, "options.logit_bias[0]"),
        ({"prompt": "x", "stop_token_ids": [1, 258]}, "options.stop_token_ids[1]"),
        ({"prompt": "x", "stop_token_ids": [1] * 65}, "options.stop_token_ids"),
        ({"prompt": "x", "bad_words": [Word(token_ids=[1]), Word()]}, "options.bad_words[1]"),
        ({"prompt": "x", "bad_words": [Word(token_ids=[1] * 65)]}, "options.bad_words[0]"),
        ({"prompt": "x", "bad_words": [Word(token_ids=[258])]}, "options.bad_words[0]"),
        ({"prompt": "x", "allowed_token_ids": [0, 999]}, "options.allowed_token_ids[1]"),
        ({"prompt": "x", "allowed_token_ids": [257], "min_tokens": 1}, "options.allowed_token_ids"),
        ({"prompt": "x", "logprobs": 21}, "options.logprobs"),
        ({"prompt": "x", "prompt_logprobs": 21}, "options.prompt_logprobs"),
        ({"prompt": "x", "n": 0}, "options.n"),
        ({"prompt": "x", "n": 9}, "options.n"),
        ({"prompt": "x", "n": 2**32 - 1}, "options.n"),
        ({"prompt": "x", "priority": 101}, "options.priority"),
        ({"prompt": "x", "priority": -101}, "options.priority"),
        ({"prompt": "x", "drafter": "unheard-of"}, "options.drafter"),
        ({"prompt": "x", "budget": Budget(rows=65, depth=1)}, "options.budget.rows"),
        ({"prompt": "x", "budget": Budget(rows=1, depth=33)}, "options.budget.depth"),
        ({"prompt": "x", "request_id": "a" * 129}, "options.request_id"),
        ({"prompt": "x", "request_id": "a\nb"}, "options.request_id"),
    ],
)
async def test_each_rule_is_refused_under_its_field(usual: Stack, fields: dict[str, Any], at_fault: str) -> None:
    assert await refused(usual, generation_pb2.GenerationOptions(**fields)) == [at_fault]


async def test_every_violation_is_told_at_once(usual: Stack) -> None:
    options = generation_pb2.GenerationOptions(
        prompt="",
        max_tokens=0,
        stop=["", "b" * 300],
        temperature=-1,
        drafter="x",
        budget=Budget(rows=99, depth=99),
        n=9,
        priority=-200,
        prompt_logprobs=99,
        logprobs=99,
    )
    assert await refused(usual, options) == [
        "options.max_tokens",
        "options.logprobs",
        "options.prompt_logprobs",
        "options.n",
        "options.priority",
        "options.stop[0]",
        "options.stop[1]",
        "options.drafter",
        "options.temperature",
        "options.budget.rows",
        "options.budget.depth",
        "options.prompt",
    ]


async def test_a_message_a_token_is_refused_where_there_is_one_message(usual: Stack) -> None:
    options = generation_pb2.GenerationOptions(prompt="x", max_tokens=0, stream_tokens=True)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await usual.stub.Generate(generation_pb2.GenerateRequest(options=options))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    fields = [violation.field for violation in violations_of(error.value)]
    assert fields == ["options.max_tokens", "options.stream_tokens"]


async def test_the_limit_of_answers_is_the_deployments_own() -> None:
    async with stack(n_limit=2) as each:
        assert (await each.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())).n_limit == 2
        assert await refused(each, generation_pb2.GenerationOptions(prompt="x", n=3)) == ["options.n"]
        assert len((await each.generate(max_tokens=2, n=2)).further_answers) == 1


async def test_the_worst_request_still_fits_a_status(usual: Stack) -> None:
    roles = [Said(role="\N{GRINNING FACE}" * 100) for _ in range(100)]
    options = generation_pb2.GenerationOptions(
        chat=Chat(messages=roles), drafter="日" * 500, stop=[""] * 16, temperature=-3, request_id="a" * 500
    )
    assert len(await refused(usual, options)) == 20


@pytest.mark.parametrize("at", ["", "options", "options.budget", "options.chat.messages"])
async def test_unknown_fields_are_refused_wherever_they_are(usual: Stack, at: str) -> None:
    unknown = b"\xa0\x06\x01"  # field 100, varint 1
    request = generation_pb2.GenerateRequest(
        options=generation_pb2.GenerationOptions(
            budget=Budget(rows=1, depth=1), chat=Chat(messages=[Said(role="user", content="x")])
        )
    )
    place = {
        "": request,
        "options": request.options,
        "options.budget": request.options.budget,
        "options.chat.messages": request.options.chat.messages[0],
    }[at]
    place.MergeFromString(unknown)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await usual.stub.Generate(request)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in violations_of(error.value)] == [at or "request"]


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x0a\x03\x12\x01\xff"], ids=["wire", "UTF-8"])
async def test_bytes_that_are_no_request_are_refused_as_any_bad_request(usual: Stack, garbage: bytes) -> None:
    path = f"/{generation_pb2.DESCRIPTOR.services_by_name['GenerationService'].full_name}"
    async with grpc.aio.insecure_channel(usual.target) as channel:
        unary = channel.unary_unary(f"{path}/Generate")(garbage)
        stream = channel.unary_stream(f"{path}/GenerateStream")(garbage)
        for call in (unary, stream):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "message: expected a request, got bytes that are none" in str(await call.details())
    assert (await usual.generate(max_tokens=3)).token_ids


async def test_the_limits_themselves_are_accepted(usual: Stack) -> None:
    usual.teacher.next_token = lambda history: 257  # ends at once
    for fields in (
        {"prompt_token_ids": generation_pb2.TokenIds(ids=[0, 257] * 255 + [1])},
        {"max_tokens": 4096},
        {"stop": ["a" * 256] * 16},
        {"temperature": 0},
        {"temperature": -0.0},
        {"temperature": 100, "top_k": 2**32 - 1, "top_p": 1, "min_p": 1, "seed": 2**64 - 1, "logprobs": 20},
        {"repetition_penalty": 100, "frequency_penalty": -2, "presence_penalty": 2, "min_tokens": 2**32 - 1},
        {"logit_bias": {257: 100.0}, "bad_words": [Word(token_ids=[1] * 64)] * 256, "allowed_token_ids": [0, 257]},
        {"stop_token_ids": [1] * 64, "include_stop": True},
        {"budget": Budget(rows=64, depth=32)},
        {"drafter": "other"},
        {"n": 8, "priority": 100, "prompt_logprobs": 20},
        {"n": 1, "priority": -100, "prompt_logprobs": 0, "echo": True},
        {"request_id": "a" * 128},
        {"prompt": " "},
        {"prompt": "\0"},
        {"prompt": "<|im_end|><|im_end|>"},
    ):
        response = await usual.generate(**fields)
        assert len(response.token_ids) == 1


async def test_a_prompt_that_is_too_long_harms_no_other_request(usual: Stack) -> None:
    good = asyncio.create_task(usual.generate(max_tokens=40))
    with pytest.raises(grpc.aio.AioRpcError):
        await usual.generate(prompt="x" * 1000)
    assert list((await good).token_ids) == plain(scrambled, ids_of("prompt"), 40)


async def test_any_drafter_name_is_taken_while_the_draft_is_down() -> None:
    async with stack(with_draft=False) as each:
        response = await each.generate(max_tokens=5, drafter="whatever")
    assert list(response.speculation.fallback_reasons) == ["unavailable"]


async def test_drafter_names_are_remembered_and_asked_again_for_a_new_one(usual: Stack) -> None:
    for _ in range(3):
        await usual.generate(max_tokens=2, drafter="scripted")
    assert usual.draft.calls_of_get_drafters == 1
    usual.draft.drafters.append("newer")
    await usual.generate(max_tokens=2, drafter="newer")
    assert usual.draft.calls_of_get_drafters == 2


async def test_a_request_id_comes_from_options_else_metadata_else_is_made(usual: Stack) -> None:
    async def ids(options: generation_pb2.GenerationOptions, metadata: Any) -> tuple[str, str]:
        call = usual.stub.Generate(generation_pb2.GenerateRequest(options=options), metadata=metadata)
        header = dict(await call.initial_metadata())["x-request-id"]
        return (await call).request_id, header

    two = generation_pb2.GenerationOptions(prompt="x", max_tokens=2)
    assert await ids(two, [("x-request-id", "theirs")]) == ("theirs", "theirs")
    made, header = await ids(two, None)
    assert made == header
    assert len(made) == 32
    two.request_id = "own"
    assert await ids(two, [("x-request-id", "theirs")]) == ("own", "own")


async def test_the_trace_context_of_a_request_reaches_the_teacher(usual: Stack) -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    options = generation_pb2.GenerationOptions(prompt="x", max_tokens=2)
    await usual.stub.Generate(generation_pb2.GenerateRequest(options=options), metadata=[("traceparent", traceparent)])
    assert usual.teacher.sessions[0].metadata["traceparent"] == traceparent
