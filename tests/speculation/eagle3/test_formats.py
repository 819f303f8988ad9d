"""Every public layout gives the logits that its weights mean, by a second implementation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle_pangu.speculation.eagle3.formats import load_head
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from tests.speculation.eagle3 import reference
from tests.speculation.eagle3.chains import LAYERS, chain_logits, features, token_ids
from tests.speculation.eagle3.checkpoints import (
    HEAD_DIM,
    HIDDEN,
    LAYER_IDS,
    LLAMA3,
    TARGET,
    VOCAB,
    Layout,
    embeddings,
    modelopt,
    numbered,
    random_weights,
    safeailab,
    specforge,
    speculators,
    target_ids,
)
from tests.speculation.eagle3.reference import Facts

DEFAULT_LAYERS = (2, LAYERS // 2, LAYERS - 3)


def load(layout: Layout, directory: Path) -> Eagle3Head:
    return load_head(layout.write(directory), embeddings=embeddings())


def meant(facts: Facts, layers: tuple[int, int, int], target: int = HIDDEN) -> torch.Tensor:
    """The logits of the weights, so read."""
    weights = random_weights(facts.feature_norm, target)
    return reference.unroll(weights, facts, features(target, layers), token_ids())


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def assert_other(found: torch.Tensor, misread: torch.Tensor) -> None:
    assert (found - misread).abs().max() > 1e-2


PRODUCERS: dict[str, tuple[Callable[[], Layout], Facts, tuple[int, int, int], int]] = {
    "safeailab": (safeailab, Facts(), DEFAULT_LAYERS, HIDDEN),
    "specforge": (specforge, Facts(theta=1e6, feature_norm="each", recycles_normed=True), (2, 4, 6), TARGET),
    "speculators": (
        speculators,
        Facts(theta=5e5, scaling={"rope_type": "llama3", **LLAMA3}, norm_before_residual=True),
        (2, 4, 6),
        HIDDEN,
    ),
    "modelopt": (modelopt, Facts(theta=20000.0, feature_norm="whole"), (3, 5, 7), HIDDEN),
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_head_of_every_producer_gives_the_logits_it_means(producer: str, tmp_path: Path) -> None:
    layout, facts, layers, target = PRODUCERS[producer]
    head = load(layout(), tmp_path)
    assert head.config.feature_layers in (layers, None)
    assert torch.equal(head.target_ids, target_ids())
    assert_same(chain_logits(head), meant(facts, layers, target))


# ---- the four readings that are wrong without a sign ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("producer", "stated", "entries"),
    [
        (speculators, {LAYER_IDS: [2, 4, 6]}, (2, 4, 6)),
        (speculators, {LAYER_IDS: [1, 4, 6]}, (1, 4, 6)),
        (safeailab, {"eagle_config": {LAYER_IDS: [1, 3, 5]}}, (2, 4, 6)),
        (safeailab, {LAYER_IDS: [1, 3, 5]}, (1, 3, 5)),
        (safeailab, {LAYER_IDS: [2, 4, 6], "eagle_config": {LAYER_IDS: [2, 4, 6]}}, (2, 4, 6)),
        (safeailab, {LAYER_IDS: [2, 4, 6], "eagle_config": {LAYER_IDS: [1, 3, 5]}}, (2, 4, 6)),
        (modelopt, {"eagle_config": {LAYER_IDS: [1, 3, 9]}}, (1, 3, 9)),
        (safeailab, {LAYER_IDS: None}, DEFAULT_LAYERS),
        (modelopt, {"eagle_config": {LAYER_IDS: []}}, DEFAULT_LAYERS),
    ],
)
def test_layer_ids_are_entries_outputs_or_boundaries_by_where_they_stand(
    producer: Callable[[], Layout], stated: dict[str, Any], entries: tuple[int, int, int], tmp_path: Path
) -> None:
    layout = producer()
    head = load(Layout({**layout.config, **stated}, layout.tensors), tmp_path)
    facts = next(facts for made, facts, _, _ in PRODUCERS.values() if made is producer)
    assert_same(chain_logits(head), meant(facts, entries))
    low, middle, high = entries
    assert_other(chain_logits(head), meant(facts, (low - 1, middle - 1, high - 1)))


@pytest.mark.parametrize(
    ("stated", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": None}, 10000.0),
        ({"rope_theta": 1000000}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
    ],
)
def test_the_base_of_the_rotations_is_the_stated_one_and_else_ten_thousand(
    stated: dict[str, Any], theta: float, tmp_path: Path
) -> None:
    layout = safeailab()
    head = load(Layout({**layout.config, **stated}, layout.tensors), tmp_path)
    assert_same(chain_logits(head), meant(Facts(theta=theta), DEFAULT_LAYERS))
    assert_other(chain_logits(head), meant(Facts(theta=1e6 if theta == 1e4 else 1e4), DEFAULT_LAYERS))


@pytest.mark.parametrize(("stated", "after"), [({}, False), ({"norm_before_residual": True}, True)])
def test_the_residual_branches_off_before_the_norm_unless_stated(
    stated: dict[str, Any], after: bool, tmp_path: Path
) -> None:
    layout = safeailab()
    head = load(Layout({**layout.config, **stated}, layout.tensors), tmp_path)
    assert_same(chain_logits(head), meant(Facts(norm_before_residual=after), DEFAULT_LAYERS))
    assert_other(chain_logits(head), meant(Facts(norm_before_residual=not after), DEFAULT_LAYERS))


@pytest.mark.parametrize(
    ("stated", "after"), [({}, False), ({"norm_output": False}, False), ({"norm_output": True}, True)]
)
def test_the_hidden_state_is_recycled_before_the_norm_unless_stated(
    stated: dict[str, Any], after: bool, tmp_path: Path
) -> None:
    layout = safeailab()
    head = load(Layout({**layout.config, **stated}, layout.tensors), tmp_path)
    assert_same(chain_logits(head), meant(Facts(recycles_normed=after), DEFAULT_LAYERS))
    assert_other(chain_logits(head), meant(Facts(recycles_normed=not after), DEFAULT_LAYERS))


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("name", ["norm_before_residual", "norm_output"])
def test_a_flag_may_stand_in_eagle_config_too(name: str, value: bool, tmp_path: Path) -> None:
    layout = safeailab()
    stated = {"eagle_config": {name: value}}
    head = load(Layout({**layout.config, **stated}, layout.tensors), tmp_path)
    facts = Facts(norm_before_residual=value and name != "norm_output", recycles_normed=value and name == "norm_output")
    assert_same(chain_logits(head), meant(facts, DEFAULT_LAYERS))


# ---- what else differs between producers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4}, "rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_theta": 500,
        },
    ],
)
def test_scaled_rotations_read_the_same_in_every_spelling(spelling: dict[str, Any], tmp_path: Path) -> None:
    layout = safeailab()
    head = load(Layout({**layout.config, **spelling}, layout.tensors), tmp_path)
    facts = Facts(theta=500.0, scaling={"rope_type": "linear", "factor": 4.0})
    assert_same(chain_logits(head), meant(facts, DEFAULT_LAYERS))
    assert_other(chain_logits(head), meant(Facts(theta=500.0), DEFAULT_LAYERS))


def test_the_fields_of_yarn_reach_the_rotations(tmp_path: Path) -> None:
    layout = safeailab()
    yarn = {"type": "yarn", "factor": 16.0, "beta_fast": 1.0, "original_max_position_embeddings": 32}
    head = load(Layout({**layout.config, "rope_scaling": yarn}, layout.tensors), tmp_path)
    assert dict(head.config.rope_parameters) == {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 1.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    assert_other(chain_logits(head), meant(Facts(), DEFAULT_LAYERS))


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("spelled", [dict, numbered])
def test_tensors_go_by_every_public_spelling(
    spelled: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], prefix: str, tmp_path: Path
) -> None:
    layout = specforge()
    tensors = {prefix + name: tensor for name, tensor in spelled(layout.tensors).items()}
    _, facts, layers, target = PRODUCERS["specforge"]
    assert_same(chain_logits(load(Layout(layout.config, tensors), tmp_path)), meant(facts, layers, target))


def write_shards(layout: Layout, directory: Path) -> None:
    names = sorted(layout.tensors)
    placed = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: layout.tensors[name] for name in names if placed[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def write_pickle(layout: Layout, directory: Path) -> None:
    torch.save(layout.tensors, directory / "pytorch_model.bin")


@pytest.mark.parametrize("write", [write_shards, write_pickle])
def test_shards_and_pickled_weights_read_as_one_file_does(
    write: Callable[[Layout, Path], None], tmp_path: Path
) -> None:
    layout = safeailab()
    expected = chain_logits(load(layout, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    write(layout, tmp_path)
    assert torch.equal(chain_logits(load_head(tmp_path, embeddings=embeddings())), expected)


def test_embeddings_are_the_teachers_and_copied_where_the_file_has_none(tmp_path: Path) -> None:
    teachers = embeddings()
    head = load_head(safeailab().write(tmp_path), embeddings=teachers)
    assert torch.equal(head.embed_tokens.weight, teachers)
    assert head.embed_tokens.weight.data_ptr() != teachers.data_ptr()


def test_embeddings_of_the_file_win(tmp_path: Path) -> None:
    directory = specforge().write(tmp_path)
    for given in (None, 2 * embeddings(), torch.zeros(3, 3)):
        head = load_head(directory, embeddings=given)
        assert torch.equal(head.embed_tokens.weight, random_weights("each", TARGET)["embed_tokens.weight"])


@pytest.mark.parametrize("draft_vocab_size", [VOCAB, None])
@pytest.mark.parametrize("stored", [{}, {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}])
def test_a_head_of_the_full_vocabulary_needs_no_map(
    stored: dict[str, torch.Tensor], draft_vocab_size: int | None, tmp_path: Path
) -> None:
    layout = safeailab()
    weights = random_weights(draft_vocab=VOCAB)
    config = {**layout.config, "draft_vocab_size": draft_vocab_size}
    head = load(Layout(config, {**weights, **stored}), tmp_path)
    assert torch.equal(head.target_ids, torch.arange(VOCAB))
    assert chain_logits(head).shape[-1] == VOCAB


def test_the_size_of_an_attention_head_follows_from_the_width_where_it_is_not_stated(tmp_path: Path) -> None:
    layout = safeailab()
    config = {**layout.config, "num_attention_heads": HIDDEN // HEAD_DIM, "num_key_value_heads": None}
    del config["head_dim"]
    narrow = {name: torch.zeros(HIDDEN, 2 * HIDDEN) for name in ("q_proj", "k_proj", "v_proj")}
    attention = {f"midlayer.self_attn.{name}.weight": tensor for name, tensor in narrow.items()}
    attention["midlayer.self_attn.o_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
    head = load(Layout(config, {**layout.tensors, **attention}), tmp_path)
    assert (head.config.head_dim, head.config.key_value_heads) == (HEAD_DIM, 2)


def test_weights_take_the_asked_dtype_and_rotations_stay_in_float32(tmp_path: Path) -> None:
    head = load_head(safeailab().write(tmp_path), embeddings=embeddings(), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert head.target_ids.dtype == torch.int64
    assert head.layer.rotary.inv_freq.dtype == torch.float32


def test_a_loaded_head_outlives_its_file(tmp_path: Path) -> None:
    head = load(safeailab(), tmp_path)
    expected = chain_logits(head)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(chain_logits(head), expected)
