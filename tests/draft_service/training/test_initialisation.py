"""The weights that a head begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.training.initialisation import (
    OUTPUT_SCALE,
    head_config,
    initial_head,
    require_trainable,
    teacher_head,
)
from draft_service.training.settings import TrainingError
from eagle_pangu.speculation.eagle3.errors import HeadError
from tests.draft_service.training.toy import loaded, toy_teacher
from tests.models import tiny_model

KEPT = torch.tensor([0, 3, 7, 256, 257])


def test_a_head_begins_with_the_teacher_s_words_and_its_highest_features(tmp_path: Path) -> None:
    checkpoint = loaded(toy_teacher(tmp_path))
    model: Any = checkpoint.model
    head = initial_head(checkpoint, teacher_head(checkpoint, KEPT), "none", seed=0)
    assert torch.equal(head.lm_head.weight, model.lm_head.weight[KEPT])
    torch.testing.assert_close(head.norm.weight, model.base_model.norm.weight * OUTPUT_SCALE)
    assert torch.equal(head.embed_tokens.weight, model.get_input_embeddings().weight)
    assert torch.equal(head.target_ids, KEPT)
    features = torch.randn(5, 96)
    assert torch.equal(head.fuse(features), features[:, 64:])
    for parameter in head.layer.parameters():
        if parameter.dim() == 2:
            assert 0.01 < parameter.std() < 0.03
        else:
            assert torch.equal(parameter, torch.ones_like(parameter))


def test_the_random_part_is_that_of_the_seed(tmp_path: Path) -> None:
    checkpoint = loaded(toy_teacher(tmp_path))
    output = teacher_head(checkpoint, KEPT)
    first, again, other = (initial_head(checkpoint, output, "each", seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layer.o_proj.weight"], other["layer.o_proj.weight"])


def test_embeddings_are_frozen_and_everything_else_is_trained(tmp_path: Path) -> None:
    checkpoint = loaded(toy_teacher(tmp_path))
    head = initial_head(checkpoint, teacher_head(checkpoint, KEPT), "each", seed=0)
    frozen = [name for name, value in head.named_parameters() if not value.requires_grad]
    assert frozen == ["embed_tokens.weight"]


@pytest.mark.parametrize("architecture", ["llama-bias", "qwen2", "qwen3"])
def test_heads_are_made_for_other_teachers_too(tmp_path: Path, architecture: str) -> None:
    checkpoint = loaded(tiny_model(tmp_path, architecture))
    head = initial_head(checkpoint, teacher_head(checkpoint, KEPT), "each", seed=0)
    assert all(bool(parameter.isfinite().all()) for parameter in head.parameters())


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
