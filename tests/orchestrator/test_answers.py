"""Several answers to one prompt: each the teacher's own by its own seed, all or none, and every session freed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog

from protos.v1 import generation_pb2
from tests.orchestrator.conftest import Stack, options, stack
from tests.orchestrator.scripted import EOS, ScriptedTeacher, ids_of, plain, saying, scrambled
from tests.orchestrator.test_sessions import Gate, stream_request
from tests.orchestrator.test_teacher_faults import losing

PROMPT = ids_of("prompt")
TOKENS = 20
GREEDY = plain(scrambled, PROMPT, TOKENS)


@pytest.fixture
async def sampling() -> AsyncIterator[Stack]:
    """Teacher-only, and a teacher that decides by the seed too."""
    teacher = ScriptedTeacher()
    teacher.samples = True
    async with stack(teacher) as each:
        yield each


def sampled(seed: int) -> list[int]:
    return plain(lambda history: scrambled([seed, *history]), PROMPT, TOKENS)


def answers_of(response: generation_pb2.GenerateResponse) -> list[Any]:
    return [response, *response.further_answers]


def streamed(parts: list[generation_pb2.GenerateStreamResponse], index: int) -> list[Any]:
    return [part for part in parts if part.index == index]


async def test_answer_i_is_the_one_of_seed_plus_i(sampling: Stack) -> None:
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    fields = {"max_tokens": TOKENS, "n": 4, "temperature": 1, "seed": seeds[0], "drafter": "none"}
    whole, parts = await sampling.generate(**fields), await sampling.stream(**fields)
    assert [answer.seed for answer in answers_of(whole)] == seeds
    for index, (seed, answer) in enumerate(zip(seeds, answers_of(whole), strict=True)):
        alone = await sampling.generate(**fields | {"n": 1, "seed": seed})
        assert list(answer.token_ids) == list(alone.token_ids) == sampled(seed)
        assert answer.text == alone.text
        mine = streamed(parts, index)
        assert [token for part in mine for token in part.token_ids] == sampled(seed)
        assert "".join(part.text for part in mine) == answer.text
        assert mine[-1].seed == seed
    assert len({bytes(answer.token_ids) for answer in answers_of(whole)}) == 4


async def test_a_drawn_seed_counts_on_too(sampling: Stack) -> None:
    response = await sampling.generate(max_tokens=TOKENS, n=2, temperature=1, drafter="none")
    first, second = (answer.seed for answer in answers_of(response))
    assert second == (first + 1) % 2**64
    assert list(response.further_answers[0].token_ids) == sampled(second)


async def test_greedy_answers_are_equal_with_a_draft_each(usual: Stack) -> None:
    response = await usual.generate(max_tokens=TOKENS, n=3, return_margins=True)
    for answer in answers_of(response):
        assert list(answer.token_ids) == GREEDY
        assert not answer.HasField("seed")
        assert len(answer.margins) == TOKENS
        stats = answer.speculation
        assert 1 + stats.accepted + stats.rounds == TOKENS
        assert (stats.drafter, stats.fallback_rounds) == ("scripted", 0)
        assert answer.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert len(usual.draft.sessions) == 3
    await usual.idle()


async def test_usage_counts_the_prompt_once_and_the_tokens_of_all_answers(usual: Stack) -> None:
    for response in (await usual.generate(max_tokens=TOKENS, n=3), (await usual.stream(max_tokens=TOKENS, n=3))[-1]):
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(PROMPT), 3 * TOKENS)


async def test_what_ends_an_answer_is_in_its_last_message_and_what_ends_the_stream_in_the_very_last() -> None:
    teacher = ScriptedTeacher()
    teacher.samples = True
    async with stack(teacher) as each:
        fields = {
            "max_tokens": 60,
            "n": 3,
            "temperature": 1,
            "seed": 7,
            "drafter": "none",
            "stop_token_ids": [*range(30)],
        }
        whole, parts = await each.generate(**fields), await each.stream(**fields)
    assert len({len(answer.token_ids) for answer in answers_of(whole)}) > 1
    for index, answer in enumerate(answers_of(whole)):
        *before, last = streamed(parts, index)
        assert not any(part.finish_reason or part.HasField("speculation") or part.HasField("seed") for part in before)
        assert (last.finish_reason, last.seed) == (answer.finish_reason, answer.seed)
        assert last.speculation.rounds == answer.speculation.rounds == len(answer.token_ids) - 1
    assert not any(part.HasField("usage") or part.HasField("numerics") for part in parts[:-1])
    assert (parts[-1].usage.completion_tokens, parts[-1].numerics) == (whole.usage.completion_tokens, whole.numerics)
    assert {part.request_id for part in parts} == {parts[0].request_id}


async def test_the_others_open_once_the_first_ones_prompt_is_read(usual: Stack) -> None:
    reading, read = asyncio.Event(), asyncio.Event()

    async def read_slowly(_record: Any, _context: Any) -> None:
        reading.set()
        await read.wait()

    usual.teacher.on_open = read_slowly
    generating = asyncio.create_task(usual.generate(max_tokens=TOKENS, n=4, request_id="one"))
    await reading.wait()
    assert len(usual.teacher.sessions) == 1
    read.set()
    response = await generating
    assert response.usage.cached_prompt_tokens == 0  # of answer 0
    assert {record.open.request_id for record in usual.teacher.sessions} == {"one"}
    assert len({record.epoch for record in usual.teacher.sessions}) == 4


async def test_all_answers_run_at_once(usual: Stack) -> None:
    together = asyncio.Barrier(3)

    async def meet(record: Any, _context: Any) -> None:
        if len(record.rounds) == 2:
            await together.wait()

    usual.teacher.on_verify = meet
    assert len((await usual.generate(max_tokens=TOKENS, n=3)).further_answers) == 2


async def test_each_answer_survives_the_loss_of_its_session(usual: Stack) -> None:
    usual.teacher.on_verify = losing({3, 5, 8})
    response = await usual.generate(max_tokens=TOKENS, n=3)
    assert [list(answer.token_ids) for answer in answers_of(response)] == [GREEDY] * 3
    assert len(usual.teacher.sessions) == 6


async def test_one_of_them_computed_in_a_lesser_way_is_told_for_all(usual: Stack) -> None:
    async def get_worse(_record: Any, _context: Any) -> None:
        if len(usual.teacher.sessions) == 2:
            usual.teacher.numerics.degraded_reason = "no invariance class"

    usual.teacher.on_open = get_worse
    whole = await usual.generate(max_tokens=5, n=2)
    assert whole.numerics.degraded_reason == "no invariance class"
    usual.teacher.sessions.clear()
    usual.teacher.numerics.degraded_reason = ""
    assert (await usual.stream(max_tokens=5, n=2))[-1].numerics == whole.numerics


async def test_the_log_names_the_answer_that_lost_its_teacher(usual: Stack) -> None:
    usual.teacher.on_verify = losing({3})
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logged:
        await usual.generate(max_tokens=TOKENS, n=2)
    lost = [entry["answer"] for entry in logged if entry["event"] == "teacher lost"]
    reopened = [entry["answer"] for entry in logged if entry["event"] == "teacher session reopened"]
    assert lost == reopened
    assert lost in ([0], [1])
    assert sorted(entry["answer"] for entry in logged if entry["event"] == "answer ended") == [0, 1]


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("kind", ["generate", "stream"])
@pytest.mark.parametrize("when", ["open", "verify"])
async def test_one_that_fails_fails_the_call_and_frees_the_others(
    usual: Stack, failing: int, kind: str, when: str
) -> None:
    all_open = asyncio.Event()

    async def fail_or_hang(record: Any, context: grpc.aio.ServicerContext) -> None:
        if usual.teacher.sessions.index(record) == failing:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another model")
        if failing and len(usual.teacher.sessions) == 1:
            return  # the first one must go on for the others to open
        await asyncio.Event().wait()

    async def count(_record: Any, _context: Any) -> None:
        if len(usual.teacher.sessions) == 4:
            all_open.set()

    async def fail_or_hang_once_all_are_open(record: Any, context: grpc.aio.ServicerContext) -> None:
        await all_open.wait()
        await fail_or_hang(record, context)

    usual.teacher.on_open = fail_or_hang if when == "open" else count
    usual.teacher.on_verify = None if when == "open" else fail_or_hang_once_all_are_open
    call = getattr(usual, kind)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(max_tokens=400, n=4)
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    await usual.idle()


@pytest.mark.parametrize("kind", ["Generate", "GenerateStream"])
async def test_a_client_that_goes_away_frees_the_sessions_of_all_answers(usual: Stack, kind: str) -> None:
    gate = Gate(3)
    usual.teacher.on_verify = gate
    if kind == "Generate":
        call = usual.stub.Generate(generation_pb2.GenerateRequest(options=options(max_tokens=50, n=3)))
    else:
        call = usual.stub.GenerateStream(stream_request(max_tokens=50, n=3))
    await gate.reached.wait()
    call.cancel()
    await usual.idle()


async def test_a_client_that_goes_away_while_the_prompt_is_read_leaves_no_session(usual: Stack) -> None:
    reading = asyncio.Event()

    async def read_for_ever(_record: Any, _context: Any) -> None:
        reading.set()
        await asyncio.Event().wait()

    usual.teacher.on_open = read_for_ever
    call = usual.stub.GenerateStream(stream_request(max_tokens=50, n=3))
    await reading.wait()
    call.cancel()
    await usual.idle()
    assert len(usual.teacher.sessions) == 1


async def test_a_deadline_that_passes_frees_the_sessions_of_all_answers(usual: Stack) -> None:
    usual.teacher.on_verify = Gate(3)
    request = generation_pb2.GenerateRequest(options=options(max_tokens=50, n=3))
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await usual.stub.Generate(request, timeout=0.5)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await usual.idle()


async def test_streams_of_several_answers_cancelled_anywhere_leave_nothing_behind(usual: Stack) -> None:
    async def one(after: int) -> None:
        call = usual.stub.GenerateStream(stream_request(max_tokens=30, n=3))
        for _ in range(after):
            await call.read()
        call.cancel()

    await asyncio.gather(*(one(after) for after in range(24)))
    await usual.service.drained()
    await usual.idle()
    assert list((await usual.generate(max_tokens=TOKENS)).token_ids) == GREEDY


async def test_a_first_token_that_ends_every_answer_needs_no_round() -> None:
    async with stack(ScriptedTeacher(saying(len(PROMPT), [EOS]))) as each:
        response = await each.generate(n=3)
        assert [list(answer.token_ids) for answer in answers_of(response)] == [[EOS]] * 3
        parts = await each.stream(n=3)
        assert sorted(part.index for part in parts) == [0, 1, 2]
        assert [part.HasField("usage") for part in parts] == [False, False, True]
