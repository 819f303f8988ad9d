"""The Node.js example, run as a user runs it: what npm installs and the .proto files, against a real orchestrator."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eagle_pangu.client import client as python_client
from eagle_pangu.client.client import GenerationClient
from protos.v1 import generation_pb2
from tests.orchestrator.conftest import Stack, stack
from tests.orchestrator.scripted import ScriptedTeacher, ids_of, saying

EXAMPLE = Path(python_client.__file__).parent / "node"
SECONDS = 60
SAID = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN} at the river\n"

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on the PATH to install the example with")


@pytest.fixture
async def each() -> AsyncIterator[Stack]:
    """An orchestrator whose teacher begins its answers to "prompt" with SAID: characters of several tokens."""
    async with stack(ScriptedTeacher(saying(len(ids_of("prompt")), ids_of(SAID)))) as running:
        yield running


class Printed(NamedTuple):
    """How a run ended."""

    status: int
    text: str
    answer: dict[str, Any]
    errors: list[str]


async def node(*arguments: str) -> Printed:
    assert (EXAMPLE / "node_modules").is_dir(), "not installed: make node-client"
    process = await asyncio.create_subprocess_exec(
        "node", "generate.js", *arguments, cwd=EXAMPLE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(SECONDS):
            printed, errors = (part.decode() for part in await process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    text, _, line = printed.removesuffix("\n").rpartition("\n")
    return Printed(process.returncode, text, json.loads(line or "{}"), errors.splitlines())


async def asked_of_python(each: Stack, **options: Any) -> generation_pb2.GenerateResponse:
    async with GenerationClient(each.target) as client:
        return await client.generate(generation_pb2.GenerationOptions(**options))


@pytest.mark.parametrize("flags", [[], ["--stream"]], ids=["unary", "stream"])
async def test_it_has_the_answer_of_the_python_client(each: Stack, flags: list[str]) -> None:
    printed = await node(each.target, "prompt", "--max-tokens", "40", *flags)
    expected = await asked_of_python(each, prompt="prompt", max_tokens=40)
    assert (printed.status, printed.errors) == (0, [])
    assert printed.text == expected.text
    assert printed.text.startswith(SAID)
    assert printed.answer["token_ids"] == expected.token_ids
    assert printed.answer["finish_reason"] == "FINISH_REASON_LENGTH"
    assert printed.answer["usage"]["prompt_tokens"] == 6
    assert printed.answer["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("flags", [[], ["--stream"]], ids=["unary", "stream"])
async def test_a_seed_keeps_all_its_bits(each: Stack, flags: list[str]) -> None:
    seed = 2**63 + 1  # no double
    printed = await node(
        each.target, "prompt", "--temperature", "0.5", "--seed", str(seed), "--max-tokens", "4", *flags
    )
    assert printed.answer["seed"] == str(seed)
    sampling = each.teacher.sessions[-1].open.sampling
    assert (sampling.seed, sampling.temperature) == (seed, 0.5)


async def test_chat_and_stop_strings(each: Stack) -> None:
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="prompt")])
    whole = await asked_of_python(each, chat=chat, max_tokens=20)
    stop = whole.text[5]
    printed = await node(each.target, "prompt", "--chat", "--max-tokens", "20", "--stop", "never", "--stop", stop)
    assert printed.text == whole.text[: whole.text.index(stop)]
    assert (printed.answer["finish_reason"], printed.answer["matched_stop"]) == ("FINISH_REASON_STOP", stop)


@pytest.mark.parametrize("flags", [[], ["--stream"]], ids=["unary", "stream"])
async def test_it_tells_the_fields_of_a_refused_request(each: Stack, flags: list[str]) -> None:
    printed = await node(each.target, "prompt", "--max-tokens", "0", "--temperature=-1", *flags)
    assert printed.status == 1
    assert printed.text == ""
    assert printed.errors[0].startswith("INVALID_ARGUMENT: ")
    assert printed.errors[1:] == [
        "  options.max_tokens: expected 1 to 4096, got 0",
        "  options.temperature: expected 0 (greedy) or a number in [1e-06, 100], got -1.0",
    ]


async def test_any_other_failure_is_told_by_its_status(each: Stack) -> None:
    printed = await node(each.target, "prompt", "--seconds", "0")
    assert printed.status == 1
    assert printed.errors[0].startswith("DEADLINE_EXCEEDED: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt", "--seed", str(2**64)], f'--seed: expected an integer from 0 to {2**64 - 1}, got "{2**64}"'),
        (["prompt", "--max-tokens", "ten"], f'--max-tokens: expected an integer from 0 to {2**32 - 1}, got "ten"'),
        (["prompt", "--temperature", "hot"], '--temperature: expected a number, got "hot"'),
        (["prompt", "--temprature", "1"], "Unknown option '--temprature'"),
        ([], "expected TARGET and a prompt, got 1 arguments"),
    ],
)
async def test_a_command_line_that_cannot_be_meant_is_refused(arguments: list[str], message: str) -> None:
    printed = await node("127.0.0.1:1", *arguments)
    assert printed.status == 1
    assert printed.errors[0].startswith(message)
    assert printed.errors[-1].startswith("node generate.js TARGET")
