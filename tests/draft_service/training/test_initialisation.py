"""The weights that a head begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.training.initialisation import head_config, initial_head, require_trainable, teacher_head
from draft_service.training.settings import TrainingError
from eagle_pangu.speculation.eagle3.errors import HeadError
from tests.draft_service.training.toy import loaded, toy_teacher
from tests.models import tiny_model

KEPT = torch.tensor([0, 3, 7, 256, 257])


def test_the_head_is_the_teacher_s_last_layer_and_output_layer(tmp_path: Path) -> None:
    checkpoint = loaded(toy_teacher(tmp_path))
    model: Any = checkpoint.model
    last = model.base_model.layers[-1]
    head = initial_head(checkpoint, teacher_head(checkpoint, KEPT), "none", high_rms=9.0, seed=0)
    assert torch.equal(head.lm_head.weight, model.lm_head.weight[KEPT])
    assert torch.equal(head.norm.weight, model.base_model.norm.weight)
    assert torch.equal(head.embed_tokens.weight, model.get_input_embeddings().weight)
    assert torch.equal(head.target_ids, KEPT)
    assert torch.equal(head.layer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(head.layer.o_proj.weight, last.self_attn.o_proj.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.layer, name).weight
        assert torch.equal(weight[:, 32:], getattr(last.self_attn, name).weight)
        assert 0 < weight[:, :32].abs().max() < 0.2
    features = torch.randn(5, 96)
    assert torch.equal(head.fuse(features), features[:, 64:])


def test_embeddings_are_frozen_and_everything_else_is_trained(tmp_path: Path) -> None:
    checkpoint = loaded(toy_teacher(tmp_path))
    head = initial_head(checkpoint, teacher_head(checkpoint, KEPT), "each", high_rms=1.0, seed=0)
    frozen = [name for name, value in head.named_parameters() if not value.requires_grad]
    assert frozen == ["embed_tokens.weight"]


def test_a_norm_before_fc_changes_nothing_where_all_features_have_the_same_size(tmp_path: Path) -> None:
    checkpoint = loaded(toy_teacher(tmp_path))
    output = teacher_head(checkpoint, KEPT)
    plain, normed = (initial_head(checkpoint, output, norm, high_rms=30.0, seed=0) for norm in ("none", "each"))
    features = torch.randn(1, 6, 96)
    features[..., 64:] *= 30.0 / features[..., 64:].square().mean(-1, keepdim=True).sqrt()
    ids, positions = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.arange(6)[None]

    def only_itself(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.repeat_interleave(2, dim=1)

    with torch.no_grad():
        logits = [head.logits(head.step(ids, head.fuse(features), positions, only_itself)) for head in (plain, normed)]
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("architecture", ["llama-bias", "qwen2", "qwen3"])
def test_heads_are_made_for_other_teachers_too(tmp_path: Path, architecture: str) -> None:
    checkpoint = loaded(tiny_model(tmp_path, architecture))
    model: Any = checkpoint.model
    head = initial_head(checkpoint, teacher_head(checkpoint, KEPT), "each", high_rms=1.0, seed=0)
    assert all(bool(parameter.isfinite().all()) for parameter in head.parameters())
    copied = torch.equal(head.layer.q_proj.weight[:, 64:], model.base_model.layers[-1].self_attn.q_proj.weight)
    assert copied == (architecture != "qwen3")  # its queries are normed, a head's are not
    assert torch.equal(head.layer.mlp.up_proj.weight, model.base_model.layers[-1].mlp.up_proj.weight)


def test_the_teacher_s_distribution_is_renormalised_over_the_vocabulary(tmp_path: Path) -> None:
    checkpoint = loaded(toy_teacher(tmp_path))
    model: Any = checkpoint.model
    finals = torch.randn(4, 32)
    whole = model.lm_head(finals).softmax(-1)[:, KEPT]
    torch.testing.assert_close(
        teacher_head(checkpoint, KEPT).distributions(finals), whole / whole.sum(-1, keepdim=True)
    )
    assert teacher_head(checkpoint, KEPT).holds(torch.tensor([3, 4, 257])).tolist() == [True, False, True]


def test_rope_and_shape_are_the_teacher_s(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 77.0}
    config = head_config(loaded(toy_teacher(tmp_path, rope_parameters=rope)), 9, "each")
    assert config.rope_parameters["rope_theta"] == 77.0
    assert (config.hidden_size, config.head_dim, config.key_value_heads, config.max_positions) == (32, 8, 2, 512)
    assert (config.vocab_size, config.draft_vocab_size, config.feature_layers) == (260, 9, None)


def test_what_no_head_can_be_made_or_stored_for_is_refused_first(tmp_path: Path) -> None:
    checkpoint = loaded(toy_teacher(tmp_path / "plain"))
    require_trainable(checkpoint, 260, "each")
    with pytest.raises(TrainingError, match="--draft-vocab: expected at most 260"):
        require_trainable(checkpoint, 261, "each")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(HeadError, match="rope_type"):
        require_trainable(loaded(toy_teacher(tmp_path / "dynamic", rope_parameters=rope)), 9, "each")
    model: Any = checkpoint.model
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(260))
    with pytest.raises(TrainingError, match=r"lm_head\.bias"):
        require_trainable(checkpoint, 9, "each")
