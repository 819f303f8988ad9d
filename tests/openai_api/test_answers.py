"""Answers in OpenAI's shape, read by the official client, which keeps the fields that are ours."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import httpx2
import openai
import pytest

from tests.openai_api.conftest import Stack
from tests.openai_api.fake_generation import CACHED, MODEL, logprobs_of

SAID = "déjà vu"
IDS = list(SAID.encode())
SAYS_HI: Any = [{"role": "user", "content": "hi"}]
PROMPT_OF_HI = len("<user>hi")


async def post(stack: Stack, path: str, **fields: Any) -> Any:
    """The JSON as it is, without the client's types."""
    async with httpx2.AsyncClient() as client:
        response = await client.post(f"{stack.url}/v1/{path}", json={"model": MODEL, **fields})
        assert response.status_code == 200, response.text
        return response.json()


async def test_a_completion_has_openais_shape_and_our_fields_beside_it(stack: Stack) -> None:
    found = await post(stack, "completions", prompt="hé", seed=5)
    created, fingerprint = found.pop("created"), found.pop("system_fingerprint")
    assert isinstance(created, int)
    assert fingerprint.startswith("fp_")
    (choice,) = found["choices"]
    assert choice.pop("speculation")["tokens_per_round"] == 2.5
    assert found.pop("id") == f"cmpl-{stack.fake.asked[0].request_id}"
    assert found == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": SAID,
                "logprobs": None,
                "finish_reason": "stop",
                "token_ids": IDS,
                "seed": 5,
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": len(IDS),
            "total_tokens": 3 + len(IDS),
            "prompt_tokens_details": {"cached_tokens": CACHED},
        },
        "numerics": {
            "dtype": "float32",
            "policy": "bitwise",
            "mode": "performance",
            "degraded_reason": "",
            "attention": "blocked",
            "attention_fallback_reason": "",
        },
    }


async def test_a_chat_completion_has_openais_shape_and_our_fields_beside_it(stack: Stack) -> None:
    found = await post(stack, "chat/completions", messages=SAYS_HI, max_completion_tokens=1, temperature=0)
    (choice,) = found["choices"]
    del choice["speculation"]
    assert found["id"] == f"chatcmpl-{stack.fake.asked[0].request_id}"
    assert found["object"] == "chat.completion"
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "d", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
        "token_ids": IDS[:1],
        "seed": None,
        "matched_stop": None,
    }
    assert found["usage"]["total_tokens"] == PROMPT_OF_HI + 1


async def test_all_n_answers_are_choices_in_order(stack: Stack) -> None:
    completion = await stack.client.completions.create(model=MODEL, prompt="a", n=3, seed=7)
    assert [(each.index, each.text) for each in completion.choices] == [(0, SAID), (1, f"1{SAID}"), (2, f"2{SAID}")]
    assert [each.model_extra["seed"] for each in completion.choices] == [7, 8, 9]
    assert [each.model_extra["speculation"]["rounds"] for each in completion.choices] == [2, 3, 4]
    chat = await stack.client.chat.completions.create(model=MODEL, messages=SAYS_HI, n=2)
    assert [each.message.content for each in chat.choices] == [SAID, f"1{SAID}"]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 2 * len(IDS) + 1


async def test_a_stop_string_is_told_and_ends_with_stop(stack: Stack) -> None:
    chat = await stack.client.chat.completions.create(model=MODEL, messages=SAYS_HI, stop=["x", " v"])
    (choice,) = chat.choices
    assert (choice.message.content, choice.finish_reason, choice.model_extra["matched_stop"]) == ("déjà", "stop", " v")


async def test_chat_logprobs_carry_bytes_so_that_a_cut_character_can_be_joined(stack: Stack) -> None:
    chat = await stack.client.chat.completions.create(model=MODEL, messages=SAYS_HI, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == SAID
    assert [entry.token for entry in content] == [bytes([each]).decode(errors="replace") for each in IDS]
    for entry, token_id in zip(content, IDS, strict=True):
        expected = logprobs_of(token_id, 2)
        assert entry.logprob == expected.logprob
        best = [(bytes(each.bytes), each.logprob) for each in entry.top_logprobs]
        assert best == list(zip(expected.top_tokens, expected.top_logprobs, strict=True))


async def test_chat_logprobs_without_top_logprobs_have_none_of_the_best(stack: Stack) -> None:
    chat = await stack.client.chat.completions.create(model=MODEL, messages=SAYS_HI, logprobs=True)
    assert [entry.top_logprobs for entry in chat.choices[0].logprobs.content] == [[]] * len(IDS)


async def test_completion_logprobs_have_the_older_form(stack: Stack) -> None:
    stack.fake.said = "aéb"
    completion = await stack.client.completions.create(model=MODEL, prompt="p", logprobs=1)
    assert completion.choices[0].logprobs.model_dump() == {
        "tokens": ["a", "\ufffd", "\ufffd", "b"],
        "token_logprobs": [-each / 256 for each in "aéb".encode()],
        "top_logprobs": [{token: -each / 256} for token, each in zip("a\ufffd\ufffdb", "aéb".encode(), strict=True)],
        "text_offset": [0, 1, 1, 2],  # é counts where it is complete
    }


async def test_the_chosen_token_is_among_the_best_even_where_none_were_asked_for(stack: Stack) -> None:
    completion = await stack.client.completions.create(model=MODEL, prompt="p", logprobs=0, max_tokens=1)
    assert completion.choices[0].logprobs.top_logprobs == [{"d": -ord("d") / 256}]


async def test_echo_begins_every_text_with_the_prompt_and_tells_its_ids(stack: Stack) -> None:
    completion = await stack.client.completions.create(model=MODEL, prompt=[104, 105], echo=True, n=2)
    assert [each.text for each in completion.choices] == [f"hi{SAID}", f"hi1{SAID}"]
    assert completion.model_extra["prompt_token_ids"] == [104, 105]
    assert completion.choices[0].logprobs is None


@pytest.mark.parametrize("prompt", ["éa", list("éa".encode())], ids=["text", "ids"])
async def test_echo_with_logprobs_begins_with_the_prompts_the_first_being_null(
    stack: Stack, prompt: str | list[int]
) -> None:
    completion = await stack.client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, n=2)
    for choice, said in zip(completion.choices, (SAID, f"1{SAID}"), strict=True):
        ids = list(f"éa{said}".encode())
        assert choice.logprobs.tokens == [bytes([each]).decode(errors="replace") for each in ids]
        assert choice.logprobs.token_logprobs == [None, *(-each / 256 for each in ids[1:])]
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.top_logprobs[2] == {"a": -97 / 256}
        assert choice.logprobs.text_offset[:4] == [0, 0, 1, 2]


async def test_a_prompt_of_one_token_has_only_the_null(stack: Stack) -> None:
    completion = await stack.client.completions.create(model=MODEL, prompt="a", echo=True, logprobs=0, max_tokens=1)
    assert completion.choices[0].logprobs.token_logprobs == [None, -ord("d") / 256]
    assert completion.choices[0].logprobs.tokens == ["a", "d"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream_tokens", [False, True])
async def test_a_completion_stream_adds_up_to_the_whole_answer(stack: Stack, n: int, stream_tokens: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "éa", "n": n, "logprobs": 2, "echo": True, "seed": 3}
    whole = await post(stack, "completions", **asked)
    joined: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": None})
    top: dict[str, Any] = {}
    stream = await stack.client.completions.create(
        **asked,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_tokens": stream_tokens},
    )
    chunks = [chunk.to_dict() async for chunk in stream]
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        assert chunk["object"] == "text_completion"
        top |= {key: chunk[key] for key in ("prompt_token_ids", "numerics") if key in chunk}
        for choice in chunk["choices"]:
            add(joined[choice["index"]], choice, "text")
    assert [joined[index] for index in range(n)] == whole["choices"]
    assert top == {key: whole[key] for key in top}
    assert top.keys() == {"prompt_token_ids", "numerics"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {f"cmpl-{stack.fake.asked[-1].request_id}"}
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}
    ids = [len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"]]
    assert max(ids) == (1 if stream_tokens else 3)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_chat_stream_adds_up_to_the_whole_answer(stack: Stack, n: int) -> None:
    asked: dict[str, Any] = {"messages": SAYS_HI, "n": n, "logprobs": True, "top_logprobs": 1, "seed": 3, "stop": "vu"}
    whole = await post(stack, "chat/completions", **asked)
    joined: dict[int, dict[str, Any]] = defaultdict(lambda: {"content": "", "token_ids": [], "logprobs": None})
    roles = []
    stream = await stack.client.chat.completions.create(model=MODEL, **asked, stream=True)
    async for chunk in stream:
        plain = chunk.to_dict()
        assert plain["object"] == "chat.completion.chunk"
        assert "usage" not in plain
        for choice in plain["choices"]:
            delta = choice.pop("delta")
            if "role" in delta:
                roles.append(choice["index"])
                assert delta == {"role": "assistant", "content": "", "refusal": None}
            add(joined[choice["index"]], {**choice, "content": delta.get("content", "")}, "content")
    assert sorted(roles) == list(range(n))
    for choice in whole["choices"]:
        choice["content"] = choice.pop("message")["content"]
    assert [joined[index] for index in range(n)] == whole["choices"]


def add(joined: dict[str, Any], choice: dict[str, Any], text: str) -> None:
    """One choice of a chunk to what came of it before; what is no part of a whole replaces what was there."""
    assert joined.get("finish_reason") is None, "something came after the end"
    parts, logprobs = {text, "token_ids", "logprobs"}, choice["logprobs"]
    joined |= {key: value for key, value in choice.items() if key not in parts}
    joined[text] += choice[text]
    joined["token_ids"] += choice.get("token_ids", [])
    if logprobs is not None:
        so_far = joined["logprobs"] or dict.fromkeys(logprobs)
        merged = {key: value if value is None else (so_far[key] or []) + value for key, value in logprobs.items()}
        joined["logprobs"] = merged


async def test_the_blocking_client_reads_both_kinds_too(stack: Stack) -> None:
    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=SAYS_HI)
            stream = client.completions.create(model=MODEL, prompt="a", stream=True)
            return whole.choices[0].message.content, "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == (SAID, SAID)


async def test_a_stream_is_events_of_one_line_of_ascii_and_ends_with_done(stack: Stack) -> None:
    stack.fake.said = "a\u2028b\n\nc"
    async with httpx2.AsyncClient() as client:
        asked = {"model": MODEL, "prompt": "a", "stream": True}
        response = await client.post(f"{stack.url}/v1/completions", json=asked)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.content.isascii()
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    said = "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)
    assert said == stack.fake.said


async def test_the_model_is_listed_and_described_by_its_name_with_slashes(stack: Stack) -> None:
    (listed,) = [model async for model in stack.client.models.list()]
    assert (listed.id, listed.object, listed.owned_by) == (MODEL, "model", "eagle-pangu")
    assert listed.model_extra["drafters"] == ["ngram", "none"]
    async with httpx2.AsyncClient() as client:
        found = (await client.get(f"{stack.url}/v1/models/{MODEL}")).json()
    assert found == listed.to_dict()
    assert await stack.client.models.retrieve(MODEL) == listed
