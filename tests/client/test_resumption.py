"""Whatever breaks, the caller has everything once, or an error that says where it cannot go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_pangu.client.client import GenerationClient, SyncGenerationClient
from eagle_pangu.client.resumption import Delivery, DivergedError, repeatable
from eagle_pangu.client.retries import RetryPolicy
from protos.v1 import generation_pb2
from tests.client.answers import SHORT, THREE, Delta, Request, Whole, contents
from tests.client.conftest import Attempt, Face, FakeTime, ScriptedServer

OPTIONS = generation_pb2.GenerationOptions(prompt="prompt", n=3)
BROKEN = grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("request_", [SHORT, THREE], ids=["one", "three"])
def test_a_stream_may_break_anywhere(client: Face, scripted: ScriptedServer, request_: Request) -> None:
    first = request_.stream(seed=1)
    for broken_at in range(len(first) + 1):
        scripted.plays(Attempt(first[:broken_at], BROKEN), Attempt(request_.stream(seed=broken_at)))
        got = client.stream(OPTIONS)
        assert contents(got) == contents(first), f"broken after {broken_at} messages"
        assert got[:broken_at] == first[:broken_at]
        assert len(scripted.asked) == (1 if broken_at == len(first) else 2)


def test_an_unbroken_stream_is_handed_on_as_it_is(client: Face, scripted: ScriptedServer) -> None:
    messages = [Delta(request_id="empty"), *THREE.stream(seed=3)]
    scripted.plays(Attempt(messages))
    assert client.stream(OPTIONS) == messages


wholes = st.builds(
    Whole,
    st.lists(st.integers(0, 5), min_size=1, max_size=12).map(tuple),
    st.text(st.sampled_from("ab\N{GRINNING FACE}\N{COMBINING ACUTE ACCENT}"), max_size=12),
)
requests = st.builds(Request, st.lists(wholes, min_size=1, max_size=3).map(tuple), st.just((1, 2, 3)))


@given(request=requests, breaks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), min_size=1, max_size=4))
def test_it_may_break_often_and_be_cut_differently_each_time(request: Request, breaks: list[tuple[int, int]]) -> None:
    delivery, got = Delivery(), []
    for seed, broken_at in [*breaks, (0, 99)]:
        delivery.begin_attempt()
        got += [news for message in request.stream(seed)[:broken_at] if (news := delivery.news_of(message))]
        if delivery.complete:
            break
    delivery.end_attempt()
    assert contents(got) == contents(request.stream(0))


@given(request=requests, seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)), broken_at=st.integers(1, 30))
def test_no_delta_of_a_repetition_is_empty(request: Request, seeds: tuple[int, int], broken_at: int) -> None:
    first, delivery = request.stream(seeds[0]), Delivery()
    delivery.begin_attempt()
    for message in first[: min(broken_at, len(first) - 1)]:
        delivery.news_of(message)
    delivery.begin_attempt()
    for message in request.stream(seeds[1]):
        news = delivery.news_of(message)
        assert news is None or news.token_ids or news.text or news.finish_reason or news.HasField("usage")


def test_an_answer_that_is_over_may_end_the_stream_next_time(client: Face, scripted: ScriptedServer) -> None:
    def last(index: int, **fields: Any) -> Delta:
        return Delta(index=index, token_ids=[1], finish_reason=1, matched_stop="x", seed=1, **fields)

    had = [last(0), Delta(index=1, token_ids=[1])]
    then = [last(1), last(0, usage={"completion_tokens": 2}, numerics={"policy": "free"})]
    scripted.plays(Attempt(had, BROKEN), Attempt(then))
    end_of_one = Delta(index=1, finish_reason=1, matched_stop="x", seed=1)
    end_of_stream = Delta(index=0, usage={"completion_tokens": 2}, numerics={"policy": "free"})
    assert client.stream(OPTIONS) == [*had, end_of_one, end_of_stream]


def broken_and_repeated(client: Face, scripted: ScriptedServer, had: list[Delta], then: list[Delta]) -> DivergedError:
    scripted.plays(Attempt(had, BROKEN), Attempt(then))
    with pytest.raises(DivergedError) as error:
        client.stream(OPTIONS)
    assert client.got == had
    return error.value


def test_other_ids_are_not_delivered(client: Face, scripted: ScriptedServer) -> None:
    had = [Delta(index=1, token_ids=[1, 2, 3], text="abc")]
    then = [Delta(index=1, token_ids=[1]), Delta(index=1, token_ids=[2, 9, 4], text="abcd")]
    error = broken_and_repeated(client, scripted, had, then)
    assert (error.index, error.field, error.position) == (1, "token_ids", 2)
    assert str(error) == "answer 1, token_ids[2]: expected 3 as delivered before the stream broke, got 9"


def test_nor_is_other_text(client: Face, scripted: ScriptedServer) -> None:
    had = [Delta(token_ids=[1], text="\N{GRINNING FACE}"), Delta(token_ids=[2], text="b")]
    error = broken_and_repeated(client, scripted, had, [Delta(token_ids=[1, 2, 3], text="\N{GRINNING FACE}cd")])
    assert (error.index, error.field, error.position) == (0, "text", 1)


def test_nor_is_an_answer_to_another_prompt(client: Face, scripted: ScriptedServer) -> None:
    had = [Delta(token_ids=[1], prompt_token_ids=[1, 2])]
    for other, position in (([1, 3], 1), ([1], 1), ([1, 2, 3], 2), ([], 0)):
        error = broken_and_repeated(client, scripted, had, [Delta(token_ids=[1, 2], prompt_token_ids=other)])
        assert (error.field, error.position) == ("prompt_token_ids", position)


@pytest.mark.parametrize("last", [{"finish_reason": 1}, {}], ids=["finished", "just over"])
def test_nor_is_one_that_ends_earlier(client: Face, scripted: ScriptedServer, last: dict[str, int]) -> None:
    had = [Delta(token_ids=[1, 2], text="ab")]
    error = broken_and_repeated(client, scripted, had, [Delta(token_ids=[1], text="ab", **last)])
    assert (error.field, error.position) == ("token_ids", 1)
    assert str(error).endswith("got the end")
    error = broken_and_repeated(client, scripted, had, [Delta(token_ids=[1, 2], text="a", **last)])
    assert (error.field, error.position) == ("text", 1)


def test_nor_is_one_that_goes_on_past_its_end(client: Face, scripted: ScriptedServer) -> None:
    had = [Delta(token_ids=[1], text="a", finish_reason=1)]
    error = broken_and_repeated(client, scripted, had, [Delta(token_ids=[1], text="a"), Delta(token_ids=[2])])
    assert (error.field, error.position) == ("token_ids", 1)
    assert "expected the end" in str(error)
    error = broken_and_repeated(client, scripted, had, [Delta(token_ids=[1], text="a!", finish_reason=1)])
    assert (error.field, error.position) == ("text", 1)


def test_answers_diverge_apart(client: Face, scripted: ScriptedServer) -> None:
    had = [Delta(index=0, token_ids=[1, 2]), Delta(index=1, token_ids=[3])]
    then = [Delta(index=1, token_ids=[3, 4]), Delta(index=0, token_ids=[1, 5])]
    scripted.plays(Attempt(had, BROKEN), Attempt(then))
    with pytest.raises(DivergedError) as error:
        client.stream(OPTIONS)
    assert (error.value.index, error.value.position) == (0, 1)
    assert client.got == [*had, Delta(index=1, token_ids=[4])]


def endless(first: int) -> Iterator[Delta]:
    yield Delta(token_ids=[first])
    while True:
        yield Delta(token_ids=[3])


# The error is held on to, and with it the frame that has the call: nobody collects the call as garbage.
def test_a_diverged_blocking_call_is_cancelled(scripted: ScriptedServer) -> None:
    scripted.plays(Attempt([Delta(token_ids=[1])], BROKEN), Attempt(endless(2)))
    with SyncGenerationClient(scripted.target, sleep=FakeTime().sleep) as client:
        with pytest.raises(DivergedError) as error:
            list(client.generate_stream(OPTIONS))
        for _ in scripted.asked:
            assert scripted.ended.acquire(timeout=10)
    assert error.value.position == 0


async def test_a_diverged_call_is_cancelled(scripted: ScriptedServer) -> None:
    scripted.plays(Attempt([Delta(token_ids=[1])], BROKEN), Attempt(endless(2)))
    async with GenerationClient(scripted.target, sleep=FakeTime().sleep_async) as client:
        with pytest.raises(DivergedError) as error:
            [delta async for delta in client.generate_stream(OPTIONS)]
        for _ in scripted.asked:
            assert await asyncio.to_thread(scripted.ended.acquire, timeout=10)
    assert error.value.position == 0


def test_an_error_after_the_last_message_that_is_not_retried_is_told(client: Face, scripted: ScriptedServer) -> None:
    scripted.plays(Attempt(SHORT.stream(0), grpc.StatusCode.INTERNAL))
    with pytest.raises(grpc.RpcError):
        client.stream(OPTIONS)
    assert client.got == SHORT.stream(0)


def test_what_was_delivered_survives_a_last_failure(client: Face, scripted: ScriptedServer) -> None:
    messages = THREE.stream(4)
    scripted.plays(Attempt(messages[:5], BROKEN), Attempt(messages[:2], BROKEN))
    with pytest.raises(grpc.RpcError) as error:
        client.stream(OPTIONS, retries=RetryPolicy(attempts=2))
    assert error.value.code() == BROKEN
    assert client.got == messages[:5]


def test_every_attempt_samples_with_one_seed(client: Face, scripted: ScriptedServer) -> None:
    options = generation_pb2.GenerationOptions(prompt="prompt", temperature=0.5)
    seeds = set()
    for _ in range(3):
        scripted.plays(Attempt(code=BROKEN), Attempt(code=BROKEN), Attempt(SHORT.stream(0)))
        client.stream(options)
        assert all(request.options.HasField("seed") for request in scripted.asked)
        assert len({request.options.seed for request in scripted.asked}) == 1
        seeds.add(scripted.asked[0].options.seed)
    assert len(seeds) == 3
    assert not options.HasField("seed")


def test_drawn_seeds_have_64_bits() -> None:
    options = generation_pb2.GenerationOptions(temperature=1)
    assert max(repeatable(options).options.seed for _ in range(64)) >= 2**62


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5, "seed": 0},
        {"temperature": 0.5, "seed": 2**64 - 1},
        {"temperature": 0},
        {},
    ],
)
def test_nothing_else_of_a_request_changes(options: dict[str, float]) -> None:
    wanted = generation_pb2.GenerationOptions(prompt="prompt", **options)
    assert repeatable(wanted).options == wanted
