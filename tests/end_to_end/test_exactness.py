"""The one law, on the real model: whatever drafts, the ids are the teacher's own.

A slice of what `eagle-pangu bench` shows in full; the README names those commands.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.end_to_end.conftest import chat, oracle_ids, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BUDGETS = [(2, 2), (8, 6), (16, 10)]


@pytest.mark.parametrize(
    ("mode", "prefill_chunk", "max_tokens", "budgets"),
    # The guard of the reference mode makes a pass several times slower: fewer tokens, one budget.
    [("performance", 256, 24, BUDGETS), ("reference", 16, 8, BUDGETS[1:2])],
)
async def test_float32_ids_equal_teacher_only_and_transformers_own_greedy_generate(
    model_directory: Path,
    noisy_draft: Path,
    oracle: PreTrainedModel,
    prompts: list[str],
    mode: str,
    prefill_chunk: int,
    max_tokens: int,
    budgets: list[tuple[int, int]],
) -> None:
    teacher = {"dtype": "float32", "mode": mode, "prefill_chunk": prefill_chunk}
    draft = {"model": str(noisy_draft), "dtype": "float32", "drafter": "hybrid"}
    async with serving(teacher=teacher, draft=draft) as (_, client):
        for prompt in prompts[:2]:
            plain = await client.generate(chat(prompt, "none", max_tokens=max_tokens))
            assert plain.numerics.policy == "bitwise"
            assert list(plain.token_ids) == oracle_ids(oracle, model_directory, prompt, len(plain.token_ids))
            # The standalone draft is as large as the teacher; one prompt is enough of it here.
            for drafter in ("ngram", "eagle3", "hybrid", "standalone")[: 4 if prompt == prompts[1] else 3]:
                for rows, depth in budgets if prompt == prompts[0] and drafter != "eagle3" else budgets[:1]:
                    answer = await client.generate(chat(prompt, drafter, rows, depth, max_tokens=max_tokens))
                    assert answer.token_ids == plain.token_ids, (drafter, rows, depth)
                    assert answer.speculation.drafter == drafter
                    assert answer.speculation.fallback_rounds == 0
                    if drafter in ("eagle3", "standalone"):
                        assert 0 < answer.speculation.accepted < answer.speculation.drafted


async def test_a_seed_gives_the_same_ids_with_any_drafter_and_none(prompts: list[str]) -> None:
    wishes = {"top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "logprobs": 2}
    answers = set()
    async with serving(teacher={"dtype": "float32"}, draft={"drafter": "hybrid"}) as (_, client):
        for number, prompt in enumerate(prompts[:3]):
            asked = {"temperature": (0.3, 0.8, 1.2)[number], "seed": number, "max_tokens": 12, **wishes}
            plain = await client.generate(chat(prompt, "none", **asked))
            for drafter in ("ngram", "hybrid"):
                answer = await client.generate(chat(prompt, drafter, **asked))
                assert answer.token_ids == plain.token_ids, drafter
                assert answer.seed == plain.seed == number
                for ours, theirs in zip(answer.logprobs, plain.logprobs, strict=True):
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
                    assert ours.top_token_ids == theirs.top_token_ids
                assert len(answer.logprobs) == len(answer.token_ids)
            answers.add(tuple(plain.token_ids))
        other = await client.generate(chat(prompts[0], "hybrid", temperature=1.2, seed=99, max_tokens=12))
        assert tuple(other.token_ids) not in answers


async def test_bfloat16_is_exact_under_the_bitwise_policy(noisy_draft: Path, prompts: list[str]) -> None:
    teacher = {"dtype": "bfloat16", "numerics": "bitwise"}
    draft = {"model": str(noisy_draft), "dtype": "bfloat16", "drafter": "hybrid"}
    async with serving(teacher=teacher, draft=draft) as (_, client):
        plain = await client.generate(chat(prompts[2], "none"))
        assert (plain.numerics.dtype, plain.numerics.policy) == ("bfloat16", "bitwise")
        for drafter, budget in (("ngram", (16, 10)), ("hybrid", (8, 6)), ("standalone", (6, 3))):
            answer = await client.generate(chat(prompts[2], drafter, *budget))
            assert answer.token_ids == plain.token_ids, drafter


async def test_the_teacher_as_its_own_draft_hits_every_boundary_in_every_round(
    model_directory: Path, prompts: list[str]
) -> None:
    """With nearly everything accepted, each stop and each budget falls in the middle of an accepted run."""
    draft = {"model": str(model_directory), "dtype": "float32", "branching": 1}
    async with serving(teacher={"dtype": "float32"}, draft=draft) as (_, client):
        plain = await client.generate(chat(prompts[0], "none", max_tokens=24))
        for max_tokens in (1, 2, 5, 6, 7, 13, 24):
            answer = await client.generate(chat(prompts[0], "standalone", 5, 5, max_tokens=max_tokens))
            assert list(answer.token_ids) == list(plain.token_ids[:max_tokens])
            assert answer.usage.completion_tokens == len(answer.token_ids)
        assert answer.speculation.tokens_per_round > 4
        stop = plain.text.split()[3]
        stopped = [
            await client.generate(chat(prompts[0], drafter, 5, 5, stop=[stop])) for drafter in ("none", "standalone")
        ]
        assert stopped[0].token_ids == stopped[1].token_ids
        assert stopped[0].text == stopped[1].text == plain.text[: plain.text.index(stop)]
        assert stopped[1].matched_stop == stop
