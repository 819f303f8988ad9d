"""Whole services on the simulated npu answer with the host's ids, whatever drafts, in both modes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from protos.v1 import generation_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.mixtures import DRAFTERS, mixture
from tests.conformance.systems import LETTERS, System, options
from tests.simulated_npu import operators
from tests.simulated_npu.device import operators_run
from tests.simulated_npu.systems import FUSED, Compute, services_on

pytestmark = [MODULE_LOOP, pytest.mark.timeout(600)]

COMPUTE = {
    "fused": Compute("llama-bias", "performance", "free", "bfloat16"),
    "bitwise": Compute("llama", "performance", "bitwise", "float32"),
    "reference": Compute("llama-bias", "reference", "free", "float32"),
}

LONG = [(place * 37) % 256 for place in range(50)]  # some chunks
REPEATING = [40, 41, 42, 43] * 6
REQUESTS: dict[str, generation_pb2.GenerationOptions] = {
    "greedy": options(LONG, budget=(6, 3), max_tokens=10),
    "seeded": options(REPEATING, budget=(6, 3), max_tokens=10, temperature=0.8, top_p=0.9, seed=7),
    "two answers": options(LONG[:20], budget=(4, 2), max_tokens=6, n=2, temperature=1.0, seed=3),
    "log-probabilities": options(REPEATING, budget=(4, 2), max_tokens=6, logprobs=3, prompt_logprobs=2),
    "begins as another": options([*LONG[:40], 7, 8], budget=(6, 3), max_tokens=6),
    "few ids": options(LETTERS, budget=(6, 3), max_tokens=10, allowed_token_ids=LETTERS[:2]),  # it repeats itself
    "mixture": mixture(3, 6),
}


@dataclass
class Pair:
    """The services on the npu, and what the host answered without a draft."""

    compute: Compute
    npu: System
    expected: dict[str, generation_pb2.GenerateResponse]


async def answers_of(each: System, drafter: str) -> dict[str, generation_pb2.GenerateResponse]:
    """Of all requests, asked at once."""
    answers = await asyncio.gather(*(each.send(asked, drafter=drafter) for asked in REQUESTS.values()))
    return dict(zip(REQUESTS, answers, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=COMPUTE)
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    compute = COMPUTE[request.param]
    directory = tmp_path_factory.mktemp("models")
    async with services_on("cpu", directory, compute) as host:
        expected = await answers_of(host, "none")
    async with services_on("npu", directory, compute) as npu:
        yield Pair(compute, npu, expected)


def ids_of(answer: generation_pb2.GenerateResponse) -> list[list[int]]:
    return [list(answer.token_ids), *(list(other.token_ids) for other in answer.further_answers)]


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_the_ids_are_those_of_the_host_without_a_draft(pair: Pair, drafter: str) -> None:
    before = operators.calls.copy()
    on_device = operators_run.total()
    answers = await answers_of(pair.npu, drafter)
    ran = operators.calls - before
    for name, answer in answers.items():
        assert ids_of(answer) == ids_of(pair.expected[name]), name
        assert answer.speculation.fallback_rounds == 0
    assert operators_run.total() > on_device
    if drafter != "none":
        assert sum(answer.speculation.drafted for answer in answers.values()) > 0
    if drafter in ("ngram", "standalone"):
        assert sum(answer.speculation.accepted for answer in answers.values()) > 0
    # The drafts' models compute in the teacher's dtype, and have no fused operator in float32.
    assert set(ran) == ({FUSED} if pair.compute.dtype == "bfloat16" else set())


async def test_log_probabilities_are_those_of_the_host(pair: Pair) -> None:
    tolerance = 0.1 if pair.compute.dtype == "bfloat16" else 1e-3
    answer = (await answers_of(pair.npu, "ngram"))["log-probabilities"]
    expected = pair.expected["log-probabilities"]
    for ours, theirs in ((answer.logprobs, expected.logprobs), (answer.prompt_logprobs, expected.prompt_logprobs)):
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
            assert list(one.top_logprobs) == pytest.approx(list(other.top_logprobs), abs=tolerance)


async def test_a_prompt_that_begins_as_another_is_not_read_again(pair: Pair) -> None:
    for _ in range(2):
        answer = await pair.npu.send(REQUESTS["begins as another"], drafter="hybrid")
        assert ids_of(answer) == ids_of(pair.expected["begins as another"])
    assert answer.usage.cached_prompt_tokens > 0


async def test_the_answer_says_how_it_was_computed(pair: Pair) -> None:
    numerics: Any = (await pair.npu.send(REQUESTS["greedy"], drafter="none")).numerics
    compute = pair.compute
    assert (numerics.mode, numerics.policy, numerics.dtype) == (compute.mode, compute.numerics, compute.dtype)
    assert (numerics.degraded_reason, numerics.attention_fallback_reason) == ("", "")
    expected = {"bitwise": "blocked", "free": FUSED if compute.mode == "performance" else "eager"}
    assert numerics.attention == expected[compute.numerics]
