"""The network itself: shapes, what the fusion norms, and in which order the layer reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from eagle_pangu.speculation.eagle3.head import Eagle3Head, HeadConfig
from tests.speculation.eagle3.chains import causal

CONFIG = HeadConfig(
    hidden_size=32,
    intermediate_size=48,
    attention_heads=4,
    key_value_heads=2,
    head_dim=16,
    target_hidden_size=24,
    vocab_size=60,
    draft_vocab_size=20,
)
BATCH, ROWS = 2, 5
FeatureNorm = Literal["none", "whole", "each"]


def random_head(config: HeadConfig = CONFIG) -> Eagle3Head:
    torch.manual_seed(0)
    head = Eagle3Head(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        parameter.requires_grad_(False)
    return head


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, hidden states and positions of BATCH sequences."""
    random = torch.Generator().manual_seed(1)
    token_ids = torch.randint(CONFIG.vocab_size, (BATCH, ROWS), generator=random)
    hidden = torch.randn(BATCH, ROWS, CONFIG.hidden_size, generator=random)
    return token_ids, hidden, torch.arange(ROWS).expand(BATCH, ROWS)


@pytest.mark.parametrize("feature_norm", ["none", "whole", "each"])
def test_shapes_are_those_it_states(feature_norm: FeatureNorm) -> None:
    head = random_head(replace(CONFIG, feature_norm=feature_norm))
    assert head.config.feature_width == 72
    assert head.fuse(torch.randn(BATCH, ROWS, 72)).shape == (BATCH, ROWS, 32)
    output = head.step(*inputs(), causal)
    assert output.shape == head.recycled(output).shape == (BATCH, ROWS, 32)
    assert head.logits(output).shape == (BATCH, ROWS, 20)
    assert head.target_ids.shape == (20,)


def test_attention_is_asked_for_all_heads_in_one_call() -> None:
    asked = []

    def recording(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        asked.append([tuple(tensor.shape) for tensor in (query, key, value)])
        return causal(query, key, value)

    random_head().step(*inputs(), recording)
    assert asked == [[(BATCH, 4, ROWS, 16), (BATCH, 2, ROWS, 16), (BATCH, 2, ROWS, 16)]]


def unit(values: torch.Tensor) -> torch.Tensor:
    return values / (values.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt()


@pytest.mark.parametrize("feature_norm", ["none", "whole", "each"])
def test_features_are_normed_not_at_all_or_as_one_or_one_by_one(feature_norm: FeatureNorm) -> None:
    head = random_head(replace(CONFIG, feature_norm=feature_norm))
    # Of three sizes, so that one norm over all is another thing than three.
    features = torch.randn(ROWS, 3, 24) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    weights = [norm.weight for norm in head.feature_norms]
    normed = {
        "none": lambda: features.flatten(1),
        "whole": lambda: unit(features.flatten(1)) * weights[0],
        "each": lambda: (unit(features) * torch.stack(weights)).flatten(1),
    }[feature_norm]()
    torch.testing.assert_close(head.fuse(features.flatten(1)), normed @ head.fc.weight.T)


def test_the_embedding_comes_first_and_the_hidden_state_second() -> None:
    head = random_head()
    token_ids, hidden, positions = inputs()
    read: list[torch.Tensor] = []
    head.layer.q_proj.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    head.step(token_ids, hidden, positions, causal)
    embedded, hidden_half = read[0].chunk(2, dim=-1)
    expected = unit(head.embed_tokens.weight[token_ids]) * head.layer.input_layernorm.weight
    torch.testing.assert_close(embedded, expected)
    torch.testing.assert_close(hidden_half, unit(hidden) * head.layer.hidden_norm.weight)


@pytest.mark.parametrize("after", [False, True])
def test_the_residual_is_the_hidden_state_before_or_after_its_norm(after: bool) -> None:
    head = random_head(replace(CONFIG, norm_before_residual=after))
    token_ids, hidden, positions = inputs()
    head.layer.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    output = head.step(token_ids, hidden, positions, causal)
    torch.testing.assert_close(output, unit(hidden) * head.layer.hidden_norm.weight if after else hidden)


@pytest.mark.parametrize("after", [False, True])
def test_the_recycled_state_is_the_output_before_or_after_its_norm(after: bool) -> None:
    head = random_head(replace(CONFIG, recycles_normed=after))
    output = torch.randn(BATCH, ROWS, 32)
    normed = unit(output) * head.norm.weight
    torch.testing.assert_close(head.recycled(output), normed if after else output)
    torch.testing.assert_close(head.logits(output), normed @ head.lm_head.weight.T)


def test_a_row_does_not_move_when_a_row_that_it_does_not_see_does() -> None:
    head = random_head()
    token_ids, hidden, positions = inputs()
    before = head.step(token_ids, hidden, positions, causal)
    hidden[:, -1] += 1
    after = head.step(token_ids, hidden, positions, causal)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_positions_matter_only_relative_to_each_other() -> None:
    head = random_head()
    token_ids, hidden, positions = inputs()
    output = head.step(token_ids, hidden, positions, causal)
    torch.testing.assert_close(head.step(token_ids, hidden, positions + 100, causal), output, rtol=1e-4, atol=1e-4)
    assert (head.step(token_ids, hidden, positions * 2, causal) - output).abs().max() > 1e-2
