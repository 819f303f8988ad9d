"""The unroll against its definition, row by row and step by step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from draft_service.training.unroll import STEP_WEIGHT, distillation_loss, plan_steps, unroll
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from tests.draft_service.training.toy import CPU, random_head

STEPS = 4
LENGTHS, PROMPTS = [13, 3, 9, 2, 11], [5, 1, 8, 1, 2]
TOKENS, ANSWERS = sum(LENGTHS), sum(LENGTHS) - sum(PROMPTS)
VARIANTS = [{}, {"feature_norm": "each"}, {"recycles_normed": True}, {"norm_before_residual": True}]


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(50, (TOKENS,), generator=generator), torch.randn(TOKENS, 36, generator=generator)


def rotated(vector: torch.Tensor, position: int) -> torch.Tensor:
    """One head's vector, turned by its position: halves, not pairs, as in Llama."""
    half = len(vector) // 2
    angles = position * 10000.0 ** (-torch.arange(half) / half)
    low, high = vector[:half], vector[half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])


def slow_unroll(head: Eagle3Head, ids: torch.Tensor, features: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
    """Output of row t at step k of one sequence, by (k, t): one vector at a time, nothing shared with the code."""
    config, layer = head.config, head.layer
    group = config.attention_heads // config.key_value_heads
    heads = lambda values: values.view(-1, config.head_dim)  # noqa: E731
    keys: dict[tuple[int, int], list[torch.Tensor]] = {}
    values: dict[tuple[int, int], torch.Tensor] = {}
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    for k in range(STEPS):
        for t in range(len(ids) - 1 - k):
            hidden = head.fuse(features[t]) if k == 0 else head.recycled(outputs[k - 1, t])
            normed = layer.hidden_norm(hidden)
            residual = normed if config.norm_before_residual else hidden
            both = torch.cat([layer.input_layernorm(head.embed_tokens(ids[t + 1 + k])), normed])
            queries = [rotated(query, t + k) for query in heads(layer.q_proj(both))]
            keys[k, t] = [rotated(key, t + k) for key in heads(layer.k_proj(both))]
            values[k, t] = heads(layer.v_proj(both))
            seen = [(0, j) for j in range(t + 1)] + [(i, t) for i in range(1, k + 1)]
            attended = []
            for number, query in enumerate(queries):
                scores = [query @ keys[place][number // group] / math.sqrt(config.head_dim) for place in seen]
                weights = torch.stack(scores).softmax(0)
                attended.append(sum(w * values[place][number // group] for w, place in zip(weights, seen, strict=True)))
            residual = residual + layer.o_proj(torch.cat(attended))
            outputs[k, t] = residual + layer.mlp(layer.post_attention_layernorm(residual))
    return outputs


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_row_of_every_step_is_that_of_the_definition(variant: dict[str, object]) -> None:
    head = random_head(**variant)  # type: ignore[arg-type]
    ids, features = random_batch()
    plan = plan_steps(LENGTHS, PROMPTS, STEPS, CPU)
    with torch.no_grad():
        outputs = list(unroll(head, ids, features, plan))
        expected: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
        start = 0
        for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
            rows = slow_unroll(head, ids[start : start + length], features[start : start + length])
            for k in range(STEPS):
                # Row t predicts token t + 2 + k, which must be one of the answer's.
                expected[k] += [rows[k, t] for t in range(length) if prompt <= t + 2 + k < length]
            start += length
    for k in range(STEPS):
        torch.testing.assert_close(outputs[k], torch.stack(expected[k]), atol=1e-4, rtol=1e-4)


def test_a_step_answers_for_the_tokens_that_it_predicts() -> None:
    plan = plan_steps(LENGTHS, PROMPTS, STEPS, CPU)
    for k, step in enumerate(plan):
        expected, first = [], 0
        for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
            expected += [first + t + 2 + k - prompt for t in range(length) if prompt <= t + 2 + k < length]
            first += length - prompt
        assert step.answers.tolist() == expected


def test_step_0_is_the_head_s_own_step_on_the_fused_features() -> None:
    head = random_head()
    ids, features = random_batch()
    length = LENGTHS[0]
    with torch.no_grad():
        [output] = unroll(head, ids[:length], features[:length], plan_steps([length], [2], 1, CPU))
        rows = length - 2
        expected = head.step(
            ids[None, 1 : rows + 1], head.fuse(features[None, :rows]), torch.arange(rows)[None], causal
        )
    torch.testing.assert_close(output, expected[0])


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_neighbours_in_a_batch_do_not_matter() -> None:
    head = random_head()
    ids, features = random_batch()
    with torch.no_grad():
        together = list(unroll(head, ids, features, plan_steps(LENGTHS, PROMPTS, STEPS, CPU)))
        length = LENGTHS[0]
        alone = list(unroll(head, ids[:length], features[:length], plan_steps(LENGTHS[:1], PROMPTS[:1], STEPS, CPU)))
    for k in range(STEPS):
        torch.testing.assert_close(together[k][: len(alone[k])], alone[k])


def test_gradients_reach_every_weight_through_every_step() -> None:
    head = random_head(feature_norm="each")
    ids, features = random_batch()
    plan = plan_steps(LENGTHS, PROMPTS, STEPS, CPU)
    *_, last = unroll(head, ids, features, plan)
    head.zero_grad()
    last.square().sum().backward()
    unused = [name for name, value in head.named_parameters() if value.grad is None or not value.grad.any()]
    assert unused == ["norm.weight", "lm_head.weight"]  # what `logits` alone uses


def slow_loss(head: Eagle3Head, targets: torch.Tensor, usable: torch.Tensor) -> torch.Tensor:
    ids, features = random_batch()
    terms: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
    start = first = 0
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        rows = slow_unroll(head, ids[start : start + length], features[start : start + length])
        for k in range(STEPS):
            for predicted in range(max(prompt, k + 2), length):
                answer = first + predicted - prompt
                if usable[answer]:
                    logits = head.logits(rows[k, predicted - 2 - k])
                    terms[k].append(-(targets[answer] * logits.log_softmax(-1)).sum())
        start += length
        first += length - prompt
    return torch.stack([STEP_WEIGHT**k * torch.stack(terms[k]).mean() for k in range(STEPS)]).sum()


def test_the_loss_and_its_gradient_are_those_of_the_definition() -> None:
    head = random_head()
    generator = torch.Generator().manual_seed(3)
    targets = torch.randn(ANSWERS, 20, generator=generator).mul(2).softmax(-1)
    usable = torch.rand(ANSWERS, generator=generator) < 0.7
    ids, features = random_batch()
    plan = plan_steps(LENGTHS, PROMPTS, STEPS, CPU)
    losses, gradients = [], []
    for compute in (
        lambda: distillation_loss(head, unroll(head, ids, features, plan), plan, targets, usable),
        lambda: slow_loss(head, targets, usable),
    ):
        head.zero_grad()
        losses.append(compute())
        losses[-1].backward()
        gradients.append({name: value.grad for name, value in head.named_parameters()})
    torch.testing.assert_close(losses[0], losses[1], atol=1e-4, rtol=1e-4)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("lengths", [[2], [1]])
def test_a_batch_that_predicts_nothing_has_no_loss(lengths: list[int]) -> None:
    head = random_head()
    ids, features = random_batch()
    plan = plan_steps(lengths, [1], STEPS, CPU)
    outputs = unroll(head, ids[: sum(lengths)], features[: sum(lengths)], plan)
    targets = torch.full((sum(lengths) - 1, 20), 0.05)
    loss = distillation_loss(head, outputs, plan, targets, torch.ones(sum(lengths) - 1, dtype=torch.bool))
    assert loss.item() == 0
    assert not loss.requires_grad
