"""No value of a request is ignored: one out of range is refused by the name of its field; so is an unknown field."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from eagle_pangu.client.client import violations_of
from protos.v1 import generation_pb2, sampling_pb2, tree_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.systems import System

pytestmark = MODULE_LOOP

NAN = float("nan")


def _words(*ids: int) -> list[sampling_pb2.TokenSequence]:
    return [sampling_pb2.TokenSequence(token_ids=ids)]


REFUSED: list[tuple[str, Any]] = [
    ("request_id", "x" * 129),
    ("request_id", "a\nb"),
    ("prompt", ""),
    ("prompt_token_ids", generation_pb2.TokenIds()),
    ("chat", generation_pb2.ChatMessages()),
    ("chat", generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="nobody", content="x")])),
    ("max_tokens", 0),
    ("max_tokens", 10**6),
    ("stop", [""]),
    ("stop", ["x" * 257]),
    ("stop", ["x"] * 17),
    *(("temperature", value) for value in (-0.1, 1e-9, 101.0, NAN, float("inf"))),
    ("drafter", "nobody"),
    ("budget", tree_pb2.TreeBudget(rows=17, depth=1)),
    *(("top_p", value) for value in (0.0, -0.1, 1.1, NAN)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN)),
    *(("repetition_penalty", value) for value in (0.0, 101.0, NAN)),
    *((name, value) for name in ("frequency_penalty", "presence_penalty") for value in (-2.1, 2.1, NAN)),
    *(("logit_bias", value) for value in ({1: 101.0}, {1: NAN}, {260: 1.0})),
    ("stop_token_ids", [260]),
    ("stop_token_ids", [1] * 65),
    ("bad_words", _words()),
    ("bad_words", _words(260)),
    ("bad_words", _words(*[1] * 65)),
    ("bad_words", _words(1) * 257),
    ("allowed_token_ids", [260]),
    ("allowed_token_ids", [1] * 4097),
    ("logprobs", 21),
    ("n", 0),
    ("n", 10**6),
    ("prompt_logprobs", 21),
    ("priority", -101),
    ("priority", 101),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
async def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(
    self_draft: System, field: str, value: Any
) -> None:
    """Unary and streamed alike."""
    fields = {field: value} if field in ("prompt", "prompt_token_ids", "chat") else {"prompt": "x", field: value}
    options = generation_pb2.GenerationOptions(**fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await self_draft.client.generate(options, seconds=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert all(violation.field.startswith(f"options.{field}") for violation in violations_of(caught.value))
    assert violations_of(caught.value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in self_draft.client.generate_stream(options, seconds=30)]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_of_tokens_is_refused_where_nothing_streams(self_draft: System) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await self_draft.ask(max_tokens=2, stream_tokens=True)
    assert [violation.field for violation in violations_of(caught.value)] == ["options.stream_tokens"]


async def test_a_field_that_this_version_does_not_know_is_refused_by_number(self_draft: System) -> None:
    highest = max(generation_pb2.GenerationOptions.DESCRIPTOR.fields_by_number)
    options = generation_pb2.GenerationOptions(prompt="x", max_tokens=2)
    tag = (highest + 1) << 3
    options.MergeFromString(bytes([tag & 0x7F | 0x80, tag >> 7, 1]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await self_draft.client.generate(options, seconds=30)
    [violation] = violations_of(caught.value)
    assert (violation.field, str(highest + 1) in violation.reason) == ("options", True)


async def test_every_field_with_a_range_has_a_value_that_is_refused() -> None:
    fields = generation_pb2.GenerationOptions.DESCRIPTOR.fields_by_name
    flags = {name for name, field in fields.items() if field.type == field.TYPE_BOOL}
    every_number_means_something = {"seed", "top_k", "min_tokens"}
    assert {field for field, _ in REFUSED} == set(fields) - flags - every_number_means_something
