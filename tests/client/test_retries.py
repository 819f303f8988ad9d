"""What is asked again, when, and how often; the same for both clients."""

from __future__ import annotations

import math

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_pangu.client.retries import RetryPolicy
from protos.v1 import generation_pb2
from tests.client.conftest import Attempt, Face, ScriptedServer

Code = grpc.StatusCode
OPTIONS = generation_pb2.GenerationOptions(prompt="prompt")
ANSWER = generation_pb2.GenerateResponse(text="answer", token_ids=[1, 2])
LAST = generation_pb2.GenerateStreamResponse(token_ids=[1], finish_reason=generation_pb2.FINISH_REASON_STOP)
LAST.usage.completion_tokens = 1
RETRIED = [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.ABORTED]


@pytest.mark.parametrize("code", RETRIED)
def test_these_statuses_are_asked_again(client: Face, scripted: ScriptedServer, code: Code) -> None:
    scripted.plays(Attempt(code=code), Attempt(code=code), Attempt([ANSWER]))
    assert client.generate(OPTIONS) == ANSWER
    assert [request.options for request in scripted.asked] == [OPTIONS] * 3


@pytest.mark.parametrize("code", [code for code in Code if code not in (Code.OK, *RETRIED)])
def test_no_other_is(client: Face, scripted: ScriptedServer, code: Code) -> None:
    for ask in (client.generate, client.stream):
        scripted.plays(Attempt(code=code), Attempt([LAST]))
        with pytest.raises(grpc.RpcError) as error:
            ask(OPTIONS)
        assert error.value.code() == code
        assert len(scripted.asked) == 1
    assert client.time.waits == []


def test_streams_and_model_info_are_asked_again_too(client: Face, scripted: ScriptedServer) -> None:
    info = generation_pb2.GetModelInfoResponse(default_drafter="ngram")
    scripted.plays(Attempt(code=Code.UNAVAILABLE), Attempt([info]))
    assert client.model_info() == info
    scripted.plays(Attempt(code=Code.UNAVAILABLE), Attempt([LAST]))
    assert client.stream(OPTIONS) == [LAST]


def test_the_last_attempt_s_error_is_told(client: Face, scripted: ScriptedServer) -> None:
    for ask in (client.generate, client.stream):
        scripted.plays(Attempt(code=Code.UNAVAILABLE), Attempt(code=Code.ABORTED), Attempt([LAST]))
        with pytest.raises(grpc.RpcError) as error:
            ask(OPTIONS, retries=RetryPolicy(attempts=2))
        assert error.value.code() == Code.ABORTED
        assert len(scripted.asked) == 2


def test_one_attempt_means_no_retries(client: Face, scripted: ScriptedServer) -> None:
    scripted.plays(Attempt(code=Code.UNAVAILABLE), Attempt([ANSWER]))
    with pytest.raises(grpc.RpcError):
        client.generate(OPTIONS, retries=RetryPolicy(attempts=1))
    assert len(scripted.asked) == 1
    assert client.time.waits == []


def test_waits_grow_and_stop_growing(client: Face, scripted: ScriptedServer) -> None:
    scripted.plays(*[Attempt(code=Code.UNAVAILABLE)] * 4, Attempt([LAST]))
    client.stream(OPTIONS, retries=RetryPolicy(attempts=5, first_backoff_seconds=1, most_backoff_seconds=4))
    assert all(longest / 2 <= wait <= longest for wait, longest in zip(client.time.waits, [1, 2, 4, 4], strict=True))


def test_waits_of_two_calls_differ(client: Face, scripted: ScriptedServer) -> None:
    for _ in range(2):
        scripted.plays(Attempt(code=Code.UNAVAILABLE), Attempt([ANSWER]))
        client.generate(OPTIONS)
    assert len(set(client.time.waits)) == 2


@pytest.mark.parametrize("code", RETRIED)
def test_a_wait_that_the_server_names_is_kept_to(client: Face, scripted: ScriptedServer, code: Code) -> None:
    scripted.plays(Attempt(code=code, retry_after=7.25), Attempt(code=code, retry_after=0), Attempt([LAST], code=None))
    client.stream(OPTIONS, retries=RetryPolicy(most_backoff_seconds=0.5))
    assert client.time.waits == [7.25, 0]


def test_a_negative_wait_is_none(client: Face, scripted: ScriptedServer) -> None:
    scripted.plays(Attempt(code=Code.RESOURCE_EXHAUSTED, retry_after=-3), Attempt([ANSWER]))
    client.generate(OPTIONS)
    assert client.time.waits == [0]


def test_details_that_do_not_parse_hide_nothing(client: Face, scripted: ScriptedServer) -> None:
    broken = Attempt(code=Code.UNAVAILABLE, details=b"\xff\xff\xff")
    scripted.plays(broken, broken, broken)
    with pytest.raises(grpc.RpcError) as error:
        client.generate(OPTIONS)
    assert error.value.code() == Code.UNAVAILABLE


def test_the_deadline_is_one_over_all_attempts(client: Face, scripted: ScriptedServer) -> None:
    for ask in (client.generate, client.stream):
        busy = Attempt(code=Code.RESOURCE_EXHAUSTED, retry_after=20)
        scripted.plays(busy, busy, Attempt([LAST if ask == client.stream else ANSWER]))
        ask(OPTIONS, seconds=60)
        assert [round(limit, -1) for limit in scripted.limits] == [60, 40, 20]


def test_a_wait_past_the_deadline_is_not_begun(client: Face, scripted: ScriptedServer) -> None:
    for ask in (client.generate, client.stream):
        scripted.plays(Attempt(code=Code.RESOURCE_EXHAUSTED, retry_after=30), Attempt([ANSWER]))
        with pytest.raises(grpc.RpcError) as error:
            ask(OPTIONS, seconds=30)
        assert error.value.code() == Code.RESOURCE_EXHAUSTED
        assert len(scripted.asked) == 1
    assert client.time.waits == []


def test_without_a_deadline_none_is_sent(client: Face, scripted: ScriptedServer) -> None:
    scripted.plays(Attempt([ANSWER]))
    client.generate(OPTIONS)
    assert scripted.limits[0] > 1e9


def test_time_that_an_attempt_took_is_gone(client: Face, scripted: ScriptedServer) -> None:
    def takes_a_while() -> None:
        client.time.now += 20

    scripted.on_call = takes_a_while
    scripted.plays(Attempt(code=Code.UNAVAILABLE, retry_after=0), Attempt([ANSWER]))
    client.generate(OPTIONS, seconds=60)
    assert round(scripted.limits[1], -1) == 40


@given(first=st.floats(0.001, 10), factor=st.floats(1, 100), failures=st.integers(1, 5000), jitter=st.floats(0, 1))
def test_no_wait_is_past_the_most(first: float, factor: float, failures: int, jitter: float) -> None:
    policy = RetryPolicy(first_backoff_seconds=first, most_backoff_seconds=first * factor)
    assert first / 2 <= policy.backoff_seconds(failures, jitter) <= policy.most_backoff_seconds


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempts", 0),
        ("first_backoff_seconds", 0),
        ("first_backoff_seconds", math.nan),
        ("most_backoff_seconds", 0.1),
        ("most_backoff_seconds", math.inf),
        ("most_backoff_seconds", math.nan),
    ],
)
def test_a_policy_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected .*, got {value}"):
        RetryPolicy(**{field: value})
