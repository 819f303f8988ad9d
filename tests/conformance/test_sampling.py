"""Sampling: a draw depends on the request alone, and follows the teacher's own distribution."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.tree import TokenTree
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.mixtures import DRAFTERS, assert_same_answer, assert_same_logprobs
from tests.conformance.systems import LETTERS, PROMPT, System, options
from tests.orchestrator.scripted import Asked

pytestmark = MODULE_LOOP

SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "budget": (4, 2)}
TOY = LETTERS[:4]
"""A vocabulary small enough to count."""
SEEDS = 180


async def test_one_seed_gives_the_same_tokens_alone_in_a_batch_in_another_order_and_with_every_drafter(
    self_draft: System,
) -> None:
    requests = [options(PROMPT, seed=seed, **SAMPLED) for seed in range(8)]
    alone = [await self_draft.send(asked, drafter="none") for asked in requests]
    assert len({tuple(answer.token_ids) for answer in alone}) == 8
    for drafter in DRAFTERS:
        order = list(range(8))[:: -1 if drafter in ("standalone", "eagle3") else 1]
        batch = await asyncio.gather(*(self_draft.send(requests[seed], drafter=drafter) for seed in order))
        for seed, answer in zip(order, batch, strict=True):
            assert_same_answer(answer, alone[seed])


async def test_seeded_and_unseeded_requests_side_by_side_do_not_touch_each_other(self_draft: System) -> None:
    expected = await self_draft.ask(seed=7, drafter="none", **SAMPLED)
    asks = [self_draft.ask(**{"seed": 7, **SAMPLED} if number % 2 else SAMPLED) for number in range(12)]
    answers = await asyncio.gather(*asks)
    for answer in answers[1::2]:
        assert_same_answer(answer, expected)
    assert len({answer.seed for answer in answers[::2]}) == 6
    for answer in answers[::2]:  # the seed returned is the one that was used
        assert_same_answer(await self_draft.ask(seed=answer.seed, drafter="none", **SAMPLED), answer)


async def test_at_temperature_0_the_seed_does_nothing(self_draft: System) -> None:
    plain = await self_draft.ask(max_tokens=10)
    assert not plain.HasField("seed")
    for seed in (0, 1, 2**64 - 1):
        assert_same_answer(await self_draft.ask(max_tokens=10, temperature=0, seed=seed, top_k=3, top_p=0.5), plain)


def probabilities(engine: Engine, tokens: Sequence[int], temperature: float) -> NDArray[np.float64]:
    """[TOY] the teacher's own, after these tokens: from its logits, without the sampler."""
    logits = engine.prefill(engine.open_slot(64), np.array(tokens, dtype=np.int64), want_logits=True).logits
    assert logits is not None
    chosen: NDArray[np.float64] = torch.softmax(logits[-1, TOY].double() / temperature, -1).numpy()
    return chosen


def chi_square_limit(freedom: int) -> float:
    """The value that chi-square passes once in a thousand times (Wilson and Hilferty, 1931)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
async def test_draws_follow_the_teachers_distribution_with_a_draft_that_differs(
    scripted_draft: System, engine: Engine, temperature: float
) -> None:
    """First and second token together: prefill draws the one, a row of a tree or its root the other.

    The draft holds two of the four tokens under the root, whatever the teacher thinks of them.
    """

    def plan(asked: Asked) -> TokenTree:
        return TokenTree.build([asked.sequence[-1], *TOY[1:3]], [0, 0, 0])

    scripted_draft.scripted.plan = plan
    scripted_draft.scripted.asked.clear()
    asked = {"temperature": temperature, "allowed_token_ids": TOY, "max_tokens": 3, "budget": (2, 1)}
    answers = []
    for start in range(0, SEEDS, 30):
        seeds = range(start, start + 30)
        answers += await asyncio.gather(*(scripted_draft.ask(PROMPT, seed=seed, **asked) for seed in seeds))
    assert 0 < sum(answer.speculation.accepted for answer in answers) < SEEDS
    found = Counter((answer.token_ids[0], answer.token_ids[1]) for answer in answers)
    first = probabilities(engine, PROMPT, temperature)
    second = [probabilities(engine, [*PROMPT, token], temperature) for token in TOY]
    pairs = {
        (one, two): SEEDS * first[at] * second[at][place] for at, one in enumerate(TOY) for place, two in enumerate(TOY)
    }
    likely = [pair for pair, expected in pairs.items() if expected >= 5]
    groups = [([pair], pairs[pair]) for pair in likely]
    rest = [pair for pair in pairs if pair not in likely]
    if rest:
        groups.append((rest, max(sum(pairs[pair] for pair in rest), 1.0)))
    distance = sum((sum(found[pair] for pair in group) - expected) ** 2 / expected for group, expected in groups)
    assert distance < chi_square_limit(max(1, len(groups) - 1)), (distance, found, pairs)


@pytest.mark.parametrize("drafter", ["none", "standalone"])
async def test_top_p_keeps_the_head_of_the_distribution(self_draft: System, engine: Engine, drafter: str) -> None:
    hot: dict[str, Any] = {"temperature": 2.0, "drafter": drafter, "budget": (6, 4), "allowed_token_ids": TOY}
    greedy = await self_draft.ask(max_tokens=8, allowed_token_ids=TOY)
    for seed in range(3):
        tiny = await self_draft.ask(max_tokens=8, top_p=1e-6, seed=seed, **hot)
        assert tiny.token_ids == greedy.token_ids
    said: set[int] = set()
    for answer in await asyncio.gather(
        *(self_draft.ask(max_tokens=3, top_p=0.6, seed=seed, **hot) for seed in range(24))
    ):
        for place, token in enumerate(answer.token_ids):
            likely = probabilities(engine, [*PROMPT, *answer.token_ids[:place]], 2.0)
            before = likely[likely > likely[TOY.index(token)]].sum()
            assert before < 0.6
        said.add(answer.token_ids[0])
    head = probabilities(engine, PROMPT, 2.0)
    assert said == {TOY[at] for at in range(4) if head[head > head[at]].sum() < 0.6}


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "frequency penalty": {"frequency_penalty": 2.0},
    "presence penalty": {"presence_penalty": 2.0},
    "logit bias": {"logit_bias": {LETTERS[0]: 5.0, LETTERS[1]: 4.5}},
    "min tokens": {"min_tokens": 7, "stop_token_ids": LETTERS[:3]},
}


@pytest.mark.parametrize(("kind", "temperature"), [(kind, 0.8 * (at % 2)) for at, kind in enumerate(PROCESSED)])
async def test_processors_count_at_every_row_as_in_plain_decoding(
    self_draft: System, kind: str, temperature: float
) -> None:
    """On a few letters, so that tokens repeat and what was counted matters."""
    base: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 12}
    base["allowed_token_ids"] = LETTERS[:6]
    without = await self_draft.ask(drafter="none", **base)
    plain = await self_draft.ask(drafter="none", **base, **PROCESSED[kind])
    if kind == "min tokens":
        assert len(plain.token_ids) >= 7
    else:
        assert plain.token_ids != without.token_ids
    for drafter, budget in (("ngram", (8, 8)), ("standalone", (8, 4)), ("hybrid", (6, 2))):
        answer = await self_draft.ask(drafter=drafter, budget=budget, **base, **PROCESSED[kind])
        assert_same_answer(answer, plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_logprobs_with_and_without_a_draft_agree_to_a_thousandth(self_draft: System, temperature: float) -> None:
    asked: dict[str, Any] = {"logprobs": 5, "max_tokens": 10, "temperature": temperature, "seed": 1}
    plain = await self_draft.ask(drafter="none", **asked)
    assert len(plain.logprobs) == len(plain.token_ids)
    for token, entry in zip(plain.token_ids, plain.logprobs, strict=True):
        assert entry.logprob <= 0
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        if token in entry.top_token_ids:
            assert entry.logprob == entry.top_logprobs[list(entry.top_token_ids).index(token)]
    for drafter in DRAFTERS[1:]:
        deltas = await self_draft.stream(drafter=drafter, budget=(6, 3), **asked)
        assert_same_logprobs([entry for delta in deltas for entry in delta.logprobs], plain.logprobs)
