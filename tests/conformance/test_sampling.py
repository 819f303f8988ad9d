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
"""A vocabulary small enough to tell its probabilities one by one."""


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


def scores_along(engine: Engine, answer: Sequence[int]) -> NDArray[np.float64]:
    """[answer, LETTERS] the teacher's own logits before each token of an answer to PROMPT, without the sampler."""
    tokens, slot = np.array([*PROMPT, *answer[:-1]], dtype=np.int64), engine.open_slot(320)
    parts = [tokens[start : start + 16] for start in range(0, len(tokens), 16)]
    passes = [engine.prefill(slot, part, want_logits=True, every_row=True).logits for part in parts]
    logits = torch.cat([each for each in passes if each is not None])[len(PROMPT) - 1 :]
    letters: NDArray[np.float64] = logits[:, LETTERS].double().numpy()
    return letters


def heat(scores: NDArray[np.float64], drawn: NDArray[np.int64], temperature: float) -> float:
    """How far what was drawn is from this temperature, in standard deviations; above 0 where it was lower.

    Of all ways that draws may miss `softmax(scores / temperature)`, this one finds a wrong temperature soonest.
    """
    chances = np.exp(scores / temperature - (scores / temperature).max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    means = (chances * scores).sum(-1)
    variances = (chances * scores**2).sum(-1) - means**2
    return float((scores[np.arange(len(drawn)), drawn] - means).sum() / np.sqrt(variances.sum()))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
async def test_draws_follow_the_teachers_distribution_with_a_draft_that_differs(
    scripted_draft: System, engine: Engine, temperature: float
) -> None:
    """Two thousand draws in rows of trees. One letter has a bias, so that the temperature matters much: that one a
    tenth higher or lower is found to be wrong shows how much the test can see.
    """

    def plan(asked: Asked) -> TokenTree:
        return TokenTree.build([asked.sequence[-1], LETTERS[0], LETTERS[1], LETTERS[0]], [0, 0, 0, 1])

    scripted_draft.scripted.plan = plan
    scripted_draft.scripted.asked.clear()
    asked: dict[str, Any] = {"temperature": temperature, "allowed_token_ids": LETTERS, "max_tokens": 256}
    asked |= {"logit_bias": {LETTERS[0]: 4 * temperature}, "budget": (3, 2)}
    answers = await asyncio.gather(*(scripted_draft.ask(seed=seed, **asked) for seed in range(8)))
    scores = np.concatenate([scores_along(engine, answer.token_ids) for answer in answers])
    scores[:, 0] += 4 * temperature
    drawn = np.array([LETTERS.index(token) for answer in answers for token in answer.token_ids])
    assert sum(answer.speculation.accepted for answer in answers) > 400
    assert abs(heat(scores, drawn, temperature)) < 2.5
    assert heat(scores, drawn, 0.9 * temperature) < -3
    assert heat(scores, drawn, 1.1 * temperature) > 3
    expected = torch.from_numpy(scores / temperature).softmax(-1).sum(0).numpy()
    statistic = ((np.bincount(drawn, minlength=len(LETTERS)) - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(LETTERS) - 1) / 2)
    assert torch.special.gammaincc(freedom, torch.tensor(statistic / 2).float()) > 1e-3


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


@pytest.mark.parametrize(("kind", "temperature"), [(kind, heat) for kind in PROCESSED for heat in (0.0, 0.8)])
async def test_a_row_deep_in_a_tree_is_processed_with_its_own_history(
    scripted_draft: System, kind: str, temperature: float
) -> None:
    """A draft that is always right: every row of a chain of 8 has to decide with what stands above it."""
    asked: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 28, **PROCESSED[kind]}
    asked["allowed_token_ids"] = LETTERS[:6]
    plain = await scripted_draft.ask(drafter="none", **asked)
    assert max(Counter(plain.token_ids).values()) > 2, "what was counted never mattered"
    scripted_draft.knows(PROMPT, plain.token_ids, 8)
    answer = await scripted_draft.ask(budget=(8, 8), **asked)
    assert_same_answer(answer, plain)
    assert answer.speculation.rounds == -(-(len(plain.token_ids) - 1) // 9)


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
