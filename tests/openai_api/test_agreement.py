"""The real stack of tiny random models behind all its faces: unary gRPC, streaming gRPC and HTTP agree."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from protos.v1 import generation_pb2
from tests.conformance.systems import SECONDS, System, draft_settings, system, teacher_settings, tiny_engine
from tests.models import tiny_llama
from tests.openai_api.conftest import front
from tests.openai_api.mixed_requests import Mixed, mixed

MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")
REQUESTS = 100
AT_ONCE = 4
REASONS = {generation_pb2.FINISH_REASON_STOP: "stop", generation_pb2.FINISH_REASON_LENGTH: "length"}
LEFT_OUT: dict[str, Any] = {"echo": False, "n": 1, "logprobs": None}

Plain = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """A teacher that is its own draft."""
    model: Path = tiny_llama(tmp_path_factory.mktemp("agreement") / "teacher", num_hidden_layers=2)
    settings = teacher_settings(model, prefill_chunk=64)
    async with system(
        tiny_engine(model, prefill_chunk=64), draft_settings(model, drafter="standalone"), settings
    ) as each:
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: System) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client before the front before the stack."""
    async with (
        front(stack.target) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as each,
    ):
        yield each


@MODULE_LOOP
async def test_every_face_gives_the_same_answers(stack: System, client: openai.AsyncOpenAI) -> None:
    (model,) = [model.id async for model in client.models.list()]
    turn = asyncio.Semaphore(AT_ONCE)
    seen: set[str] = set()

    async def agree(number: int) -> None:
        async with turn:
            asked = mixed(number)
            whole = await stack.client.generate(asked.options, seconds=SECONDS)
            streamed = joined([each async for each in stack.client.generate_stream(asked.options, seconds=SECONDS)])
            over_http = await ask(client, model, asked, stream=number % 4 < 2)
        assert_same(streamed, plain(whole))
        assert_same(over_http, as_http(asked, plain(whole)))
        seen.add(REASONS[whole.finish_reason])
        seen.update(name for name, left_out in LEFT_OUT.items() if asked.body.get(name, left_out) != left_out)
        seen.update("matched" for choice in over_http["choices"] if choice["matched_stop"])

    async with asyncio.TaskGroup() as group:
        for number in range(REQUESTS):
            group.create_task(agree(number))
    assert seen == {"stop", "length", "matched", "echo", "n", "logprobs"}, "the mix has lost a kind"


@MODULE_LOOP
async def test_what_the_teacher_had_of_the_prompt_is_told(stack: System, client: openai.AsyncOpenAI) -> None:
    (model,) = [model.id async for model in client.models.list()]
    prompt = "told twice, read once"
    cached = []
    for _ in range(2):
        answer = await client.completions.create(model=model, prompt=prompt, max_tokens=1)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[1] > cached[0]
    assert cached[1] < answer.usage.prompt_tokens


@MODULE_LOOP
async def test_leaving_a_stream_frees_the_slots(stack: System, client: openai.AsyncOpenAI) -> None:
    (model,) = [model.id async for model in client.models.list()]
    extra = {"ignore_eos": True, "drafter": "none"}
    stream = await client.completions.create(
        model=model, prompt="a", n=2, max_tokens=250, stream=True, extra_body=extra
    )
    await anext(aiter(stream))
    assert (await stack.model()).free_slots < (await stack.model()).slots
    await stream.close()
    await stack.all_slots_free()


async def ask(client: openai.AsyncOpenAI, model: str, asked: Mixed, *, stream: bool) -> Plain:
    """One answer over HTTP; a stream's, joined, with each chunk of one token."""
    create: Any = client.chat.completions.create if asked.chat else client.completions.create
    if not stream:
        whole = (await create(model=model, **asked.body, extra_body=asked.extra)).to_dict()
        for choice in whole["choices"]:
            if asked.chat:
                choice["text"] = choice.pop("message")["content"]
        return whole
    extra = {**asked.extra, "stream_tokens": True}
    chunks = await create(
        model=model, **asked.body, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    choices: dict[int, Plain] = defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": None})
    whole = {}
    async for chunk in chunks:
        whole |= chunk.to_dict()
        for choice in chunk.to_dict()["choices"]:
            _add(choices[choice["index"]], choice)
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def _add(so_far: Plain, choice: Plain) -> None:
    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
    logprobs, ids = choice["logprobs"], choice.get("token_ids", [])
    assert len(ids) <= 1
    if logprobs is not None:
        before = so_far["logprobs"] or dict.fromkeys(logprobs)
        so_far["logprobs"] = {
            key: value if value is None else (before[key] or []) + value for key, value in logprobs.items()
        }
    so_far |= {key: choice[key] for key in ("finish_reason", "matched_stop", "seed") if key in choice}
    so_far["text"] += text
    so_far["token_ids"] += ids


def plain(whole: generation_pb2.GenerateResponse) -> Plain:
    """Of a whole answer, what all faces tell."""
    return {
        "choices": [_choice(answer) for answer in (whole, *whole.further_answers)],
        "prompt": _entries(whole.prompt_logprobs),
        "usage": (whole.usage.prompt_tokens, whole.usage.completion_tokens),
    }


def joined(messages: list[generation_pb2.GenerateStreamResponse]) -> Plain:
    """The same of a stream."""
    answers: dict[int, generation_pb2.Answer] = defaultdict(generation_pb2.Answer)
    for message in messages:
        answer = answers[message.index]
        assert not answer.finish_reason
        answer.text += message.text
        answer.token_ids.extend(message.token_ids)
        answer.logprobs.extend(message.logprobs)
        if message.finish_reason:
            answer.finish_reason, answer.matched_stop = message.finish_reason, message.matched_stop
            if message.HasField("seed"):
                answer.seed = message.seed
    usage = messages[-1].usage
    return {
        "choices": [_choice(answers[index]) for index in sorted(answers)],
        "prompt": _entries(messages[0].prompt_logprobs),
        "usage": (usage.prompt_tokens, usage.completion_tokens),
    }


def _choice(answer: generation_pb2.GenerateResponse | generation_pb2.Answer) -> Plain:
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": REASONS[answer.finish_reason],
        "matched_stop": answer.matched_stop or None,
        "seed": answer.seed if answer.HasField("seed") else None,
        "logprobs": _entries(answer.logprobs),
    }


def _entries(logprobs: Any) -> list[Any]:
    """(bytes, log-probability, [(bytes, log-probability)]) a token."""
    return [
        (entry.token, entry.logprob, list(zip(entry.top_tokens, entry.top_logprobs, strict=True))) for entry in logprobs
    ]


def as_http(asked: Mixed, expected: Plain) -> Plain:
    """What HTTP has to tell of the same answer."""
    wanted = asked.body.get("logprobs") is not None
    first = [(asked.options.prompt, expected["prompt"])] if wanted and asked.body.get("echo") else []
    for choice in expected["choices"]:
        entries = choice.pop("logprobs")
        if not wanted:
            choice["logprobs"] = None
        elif asked.chat:
            choice["logprobs"] = {"content": [_chat_entry(*entry) for entry in entries], "refusal": None}
        else:
            choice["logprobs"] = _older_form(entries, *first)
    prompt_tokens, completion_tokens = expected["usage"]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": expected["choices"], "usage": {**usage, "total_tokens": prompt_tokens + completion_tokens}}


def _chat_entry(token: bytes, logprob: float, best: list[tuple[bytes, float]]) -> Plain:
    told = [{"token": each.decode(errors="replace"), "logprob": value, "bytes": list(each)} for each, value in best]
    return {
        "token": token.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(token),
        "top_logprobs": told,
    }


def _older_form(entries: list[Any], echoed: tuple[str, list[Any]] | None = None) -> Plain:
    tokens, values, best = [], [], []
    if echoed is not None:
        prompt, prompt_entries = echoed
        tokens, values, best = [prompt[0]], [None], [None]  # every prompt begins with a character of one byte
        entries = [*prompt_entries, *entries]
    for token, value, top in entries:
        tokens.append(token.decode(errors="replace"))
        values.append(value)
        by_text: Plain = {}
        for each, other in [*top, (token, value)]:
            by_text.setdefault(each.decode(errors="replace"), other)
        best.append(by_text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best}


def assert_same(found: Any, expected: Any) -> None:
    """All that `expected` has, log-probabilities to 1e-3: they may come from other rounds."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3)
    elif isinstance(expected, dict):
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected
