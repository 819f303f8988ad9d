"""What goes wrong, as the official client and a plain one see it."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from eagle_pangu.serving.errors import (
    DeadlineExceededError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from protos.errors import InvalidFieldError
from tests.openai_api.conftest import Stack, fake_stack, front
from tests.openai_api.fake_generation import MODEL

SAYS_HI: Any = [{"role": "user", "content": "hi"}]
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True])


def in_request(stack: Stack, path: str, **request: Any) -> Any:
    return httpx2.AsyncClient(base_url=stack.url).request(request.pop("method", "POST"), path, **request)


@BOTH_WAYS
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"max_tokens": 101}, "max_tokens", "max_tokens: expected 1 to 100, got 101"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: expected 1 to 100, got 0"),
        ({"stop": ["a", ""]}, "stop[1]", "stop[1]: expected 1 to 256 characters, got 0"),
        ({"prompt": [1, 256]}, "prompt[1]", "prompt[1]: expected an id in [0, 256)"),
        ({"logprobs": 21}, "logprobs", "logprobs: expected at most 20, got 21"),
    ],
)
async def test_a_field_that_the_orchestrator_refuses_is_named_as_over_http(
    stack: Stack, stream: bool, fields: dict[str, Any], param: str, said: str
) -> None:
    asked = {"prompt": "a", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.client.completions.create(model=MODEL, stream=stream, **asked)
    error = caught.value
    assert (error.status_code, error.param, error.type, error.code) == (
        400,
        param,
        "invalid_request_error",
        "invalid_value",
    )
    assert error.body["message"] == said


@BOTH_WAYS
async def test_every_refusal_of_the_orchestrator_is_told_at_once(stack: Stack, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.client.chat.completions.create(
            model=MODEL,
            messages=SAYS_HI,
            stream=stream,
            max_completion_tokens=101,
            stop="",
            logprobs=True,
            top_logprobs=21,
        )
    assert caught.value.param == "max_completion_tokens"
    assert caught.value.body["message"] == (
        "max_completion_tokens: expected 1 to 100, got 101; stop[0]: expected 1 to 256 characters, got 0; "
        "top_logprobs: expected at most 20, got 21"
    )


async def test_stream_tokens_without_a_stream_is_refused(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.client.completions.create(model=MODEL, prompt="a", extra_body={"stream_tokens": True})
    assert caught.value.body["message"] == "stream_tokens: expected only together with stream: true"
    assert caught.value.param == "stream_tokens"
    assert stack.fake.asked == []


async def test_an_unknown_field_is_refused_and_nothing_is_asked(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.client.completions.create(model=MODEL, prompt="a", best_of=2)
    assert (caught.value.param, caught.value.code) == ("best_of", "unknown_parameter")
    assert stack.fake.asked == []


@BOTH_WAYS
async def test_another_model_is_not_found(stack: Stack, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await stack.client.chat.completions.create(model="gpt-4", messages=SAYS_HI, stream=stream)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert f"'{MODEL}'" in caught.value.body["message"]
    with pytest.raises(openai.NotFoundError) as caught:
        await stack.client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


@BOTH_WAYS
@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (ResourceExhaustedError("queue full", 2.5), 429, "rate_limit_error", "resource_exhausted"),
        (UnavailableError("draining"), 503, "server_error", "unavailable"),
        (DeadlineExceededError("too late"), 504, "server_error", "deadline_exceeded"),
        (NotFoundError("what"), 500, "server_error", "not_found"),
        (InvalidFieldError("options.top_k", "expected less"), 400, "invalid_request_error", "invalid_value"),
    ],
)
async def test_a_status_has_its_http_status(
    stack: Stack, stream: bool, error: Exception, status: int, type_: str, code: str
) -> None:
    stack.fake.error = error
    with pytest.raises(openai.APIStatusError) as caught:
        await stack.client.completions.create(model=MODEL, prompt="a", stream=stream)
    assert (caught.value.status_code, caught.value.type, caught.value.code) == (status, type_, code)
    assert caught.value.body["message"].endswith(getattr(error, "reason", ""))
    assert caught.value.response.headers.get("retry-after") == ("3" if status == 429 else None)


async def test_an_unexpected_error_is_told_by_its_request_id_alone(stack: Stack) -> None:
    stack.fake.error = RuntimeError("the secret")
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.client.completions.create(model=MODEL, prompt="a", extra_headers={"x-request-id": "r-1"})
    assert caught.value.body["message"] == "internal error; the log has it under request id r-1"


async def test_an_error_of_the_front_itself_is_told_in_the_same_way(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the secret")

    monkeypatch.setattr("eagle_pangu.openai_api.app.completion_question", broken)
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.client.completions.create(model=MODEL, prompt="a", extra_headers={"x-request-id": "r-1"})
    assert caught.value.body["message"] == "internal error; the log has it under request id r-1"
    assert caught.value.response.headers["x-request-id"] == "r-1"


@pytest.mark.parametrize(
    ("error", "code"), [(UnavailableError("gone"), "unavailable"), (RuntimeError("the secret"), "internal")]
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_an_error_inside_a_stream_is_an_event_and_the_end_without_done(
    stack: Stack, path: str, error: Exception, code: str
) -> None:
    stack.fake.error, stack.fake.error_after = error, 2
    asked = {"model": MODEL, "stream": True} | ({"prompt": "a"} if path == "completions" else {"messages": SAYS_HI})
    response = await in_request(stack, f"/v1/{path}", json=asked)
    assert response.status_code == 200
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert "[DONE]" not in response.text
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all("choices" in each for each in told[:-1])
    assert len(told) >= 3
    assert told[-1].keys() == {"error"}
    assert told[-1]["error"]["code"] == code
    assert "secret" not in response.text


async def test_the_official_client_raises_an_error_inside_a_stream(stack: Stack) -> None:
    stack.fake.error, stack.fake.error_after = UnavailableError("gone"), 1
    stream = await stack.client.completions.create(model=MODEL, prompt="a", stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].text == "dé"
    with pytest.raises(openai.APIError, match="gone"):
        await anext(chunks)


async def test_a_stream_that_breaks_goes_on_where_it_broke() -> None:
    async with fake_stack(attempts=2) as stack:
        stack.fake.error, stack.fake.error_after, stack.fake.error_again = UnavailableError("gone"), 1, False
        stream = await stack.client.completions.create(model=MODEL, prompt="a", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "déjà vu"
        ids = [token_id for chunk in chunks for token_id in chunk.choices[0].model_extra["token_ids"]]
        assert ids == list("déjà vu".encode())
        first, second = stack.fake.asked
        assert first == second


async def test_an_answer_that_takes_too_long_is_504() -> None:
    async with fake_stack(request_seconds=0.2) as stack:
        stack.fake.gate.clear()
        with pytest.raises(openai.APIStatusError) as caught:
            await stack.client.completions.create(model=MODEL, prompt="a")
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


async def test_an_orchestrator_that_is_not_there_is_503_and_its_address_stays_in_the_log() -> None:
    async with front("127.0.0.1:1") as url, httpx2.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "no answer from the orchestrator (unavailable)"
        assert (await client.get("/v1/models")).status_code == 503
        assert (await client.get("/health")).status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404), ("POST", "/v1/models", 405)],
)
async def test_an_unknown_route_is_told_in_the_same_form(stack: Stack, method: str, path: str, status: int) -> None:
    response = await in_request(stack, path, method=method)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert path in response.json()["error"]["message"]
    assert "x-request-id" in response.headers


async def test_a_body_over_the_limit_is_413() -> None:
    async with fake_stack(max_message_bytes=2**16) as stack:
        asked = {"model": MODEL, "prompt": "a" * 2**16}
        response = await in_request(stack, "/v1/completions", json=asked)
        assert response.status_code == 413
        assert response.json()["error"]["message"] == "expected a body of at most 65536 bytes"
        asked["prompt"] = "a" * (2**16 - 100)
        assert (await in_request(stack, "/v1/completions", json=asked)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]"])
async def test_a_body_that_is_no_object_is_400(stack: Stack, body: bytes) -> None:
    response = await in_request(stack, "/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] is None
