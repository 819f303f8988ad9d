"""What is saved reads back to the bit, means the same to another reader, and is refused where it would not be read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle_pangu.speculation.eagle3.formats import HeadError, load_head, save_head
from eagle_pangu.speculation.eagle3.head import Eagle3Head, HeadConfig
from tests.speculation.eagle3 import checkpoints, reference
from tests.speculation.eagle3.chains import chain_logits, features, token_ids
from tests.speculation.eagle3.checkpoints import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HIDDEN,
    LAYER_IDS,
    LLAMA3,
    TARGET,
    VOCAB,
    safeailab,
    target_ids,
)

SHAPE = HeadConfig(
    hidden_size=HIDDEN,
    intermediate_size=40,
    attention_heads=4,
    key_value_heads=2,
    head_dim=HEAD_DIM,
    target_hidden_size=HIDDEN,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    rms_norm_eps=3e-5,
    max_positions=96,
)

VARIANTS: dict[str, HeadConfig] = {
    "plain": SHAPE,
    "norm-of-all": replace(SHAPE, feature_norm="whole"),
    "norm-of-each": replace(SHAPE, feature_norm="each"),
    "residual-after-norm": replace(SHAPE, norm_before_residual=True),
    "recycled-after-norm": replace(SHAPE, recycles_normed=True),
    "other-width": replace(SHAPE, target_hidden_size=TARGET),
    "layers": replace(SHAPE, feature_layers=(1, 5, 8)),
    "layers-from-the-embedding": replace(SHAPE, feature_layers=(0, 2, 9)),
    "layers-norm-of-all": replace(SHAPE, feature_layers=(2, 5, 8), feature_norm="whole"),
    "full-vocabulary": replace(SHAPE, draft_vocab_size=VOCAB),
    "rope-base": replace(SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 250000.0}),
    "rope-scaled": replace(SHAPE, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),
}


def random_head(config: HeadConfig) -> Eagle3Head:
    torch.manual_seed(1)
    head = Eagle3Head(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if config.draft_vocab_size < VOCAB:
        head.target_ids.copy_(target_ids())
    return head


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_head_reads_back_bit_for_bit(variant: str, tmp_path: Path) -> None:
    head = random_head(VARIANTS[variant])
    save_head(head, tmp_path / "new" / "head", torch_dtype=torch.float32)
    again = load_head(tmp_path / "new" / "head", embeddings=head.embed_tokens.weight)
    assert again.config == head.config
    assert torch.equal(again.target_ids, head.target_ids)
    assert torch.equal(chain_logits(again), chain_logits(head))


def test_a_saved_head_is_in_safeailabs_layout(tmp_path: Path) -> None:
    head = random_head(SHAPE)
    save_head(head, tmp_path, torch_dtype=torch.float16)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert tensors.keys() == safeailab().tensors.keys()
    assert torch.equal(tensors["d2t"], checkpoints.d2t())
    assert torch.equal(tensors["t2d"], checkpoints.t2d())
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.float16}
    known = safeailab().config.keys() - {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert config.keys() - known == {"attention_bias", "mlp_bias", "rope_scaling", "rope_theta"}
    assert known - config.keys() == set()
    assert (config["torch_dtype"], config["rope_theta"], config["rope_scaling"]) == ("float16", 10000.0, None)


@pytest.mark.parametrize("variant", ["plain", "norm-of-each", "recycled-after-norm", "residual-after-norm"])
def test_a_saved_head_means_the_same_to_another_reader(variant: str, tmp_path: Path) -> None:
    head = random_head(VARIANTS[variant])
    save_head(head, tmp_path, torch_dtype=torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    facts = reference.Facts(
        epsilon=config["rms_norm_eps"],
        theta=config["rope_theta"],
        feature_norm="each" if config.get("fc_norm") else "none",
        norm_before_residual=config.get("norm_before_residual", False),
        recycles_normed=config.get("norm_output", False),
    )
    weights = {**load_file(tmp_path / "model.safetensors"), "embed_tokens.weight": head.embed_tokens.weight.detach()}
    expected = reference.unroll(weights, facts, features(HIDDEN), token_ids())
    torch.testing.assert_close(chain_logits(head), expected, rtol=1e-5, atol=1e-5)


def test_layers_are_saved_as_each_reader_counts_them(tmp_path: Path) -> None:
    for variant, entries, nested in (
        ("layers", [1, 5, 8], {LAYER_IDS: [0, 4, 7]}),
        ("layers-from-the-embedding", [0, 2, 9], None),
        ("layers-norm-of-all", [2, 5, 8], {LAYER_IDS: [2, 5, 8]}),  # boundaries in both places
    ):
        save_head(random_head(VARIANTS[variant]), tmp_path, torch_dtype=torch.float32)
        config = json.loads((tmp_path / "config.json").read_text())
        assert (config[LAYER_IDS], config.get("eagle_config")) == (entries, nested)


def test_embeddings_are_saved_only_where_no_teacher_could_give_them(tmp_path: Path) -> None:
    for variant in ("plain", "other-width"):
        save_head(random_head(VARIANTS[variant]), tmp_path / variant, torch_dtype=torch.float32)
    assert "embed_tokens.weight" not in load_file(tmp_path / "plain" / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "target_hidden_size" not in config
    load_head(tmp_path / "other-width", embeddings=None)


def test_no_map_is_saved_of_the_full_vocabulary(tmp_path: Path) -> None:
    save_head(random_head(VARIANTS["full-vocabulary"]), tmp_path, torch_dtype=torch.float32)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()


def test_a_head_may_be_saved_over_the_files_it_was_read_from(tmp_path: Path) -> None:
    head = load_head(safeailab().write(tmp_path), embeddings=checkpoints.embeddings())
    with torch.no_grad():
        head.lm_head.weight.mul_(2)
    save_head(head, tmp_path, torch_dtype=torch.float32)
    assert torch.equal(chain_logits(load_head(tmp_path, embeddings=checkpoints.embeddings())), chain_logits(head))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_ids_that_could_not_be_read_again_are_not_saved(tmp_path: Path) -> None:
    head = random_head(SHAPE)
    head.target_ids[2] = 1
    with pytest.raises(HeadError, match="target_ids: expected ascending"):
        save_head(head, tmp_path / "head", torch_dtype=torch.float32)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"feature_layers": (4, 2, 6)}, LAYER_IDS),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_scaling.rope_type"),
    ],
)
def test_a_variant_that_could_not_be_read_again_is_not_saved(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(HeadError, match=re.escape(named)):
        save_head(random_head(replace(SHAPE, **changes)), tmp_path / "head", torch_dtype=torch.float32)
    assert not (tmp_path / "head").exists()
