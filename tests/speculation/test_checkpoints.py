"""What a model directory must hold, and what is refused rather than half-loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_pangu.speculation.checkpoints import Checkpoint, CheckpointError, load_checkpoint
from eagle_pangu.speculation.devices import get_device
from tests.models import EOS, VOCAB_SIZE, tiny_llama
from tests.openpangu import toy_openpangu


def load(directory: Path) -> Checkpoint:
    return load_checkpoint(directory, torch.float32, get_device("cpu"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(path: Path, drop: str = "", add: str = "", reshape: str = "") -> None:
    tensors = load_file(path)
    if drop:
        del tensors[drop]
    if add:
        tensors[add] = torch.zeros(3)
    if reshape:
        tensors[reshape] = torch.zeros(7, 7)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_checkpoint_knows_what_identifies_it(tmp_path: Path) -> None:
    checkpoint = load(tiny_llama(tmp_path / "tiny"))
    assert checkpoint.name == "tiny"
    assert checkpoint.vocab_size == VOCAB_SIZE
    assert checkpoint.eos_token_ids == (EOS,)
    assert checkpoint.context_limit == 512
    assert checkpoint.feature_width == 3 * 64
    assert "add_generation_prompt" in checkpoint.tokenizer.chat_template
    assert checkpoint.tokenizer.special_tokens["eos_token"] == "<|im_end|>"


def test_padded_embedding_rows_are_not_part_of_the_vocabulary(tmp_path: Path) -> None:
    assert load(tiny_llama(tmp_path, vocab_size=VOCAB_SIZE + 60)).vocab_size == VOCAB_SIZE


def test_the_tokenizer_hash_ignores_formatting_and_sees_every_token(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    before = load(directory).tokenizer.sha256
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document, indent=7))
    assert load(directory).tokenizer.sha256 == before
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(document))
    assert load(directory).tokenizer.sha256 != before


@pytest.mark.parametrize("eos", [[EOS, 258], EOS])
def test_every_end_of_sequence_id_of_the_generation_config_counts(tmp_path: Path, eos: int | list[int]) -> None:
    directory = tiny_llama(tmp_path)
    edit_json(directory / "generation_config.json", eos_token_id=eos)
    assert load(directory).eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    "fault",
    [{"drop": NORM}, {"add": "model.layers.1.self_attn.q_proj.bias"}, {"reshape": NORM}],
    ids=["missing", "unexpected", "misshapen"],
)
def test_tensors_that_do_not_match_are_refused_by_name(tmp_path: Path, fault: dict[str, str]) -> None:
    directory = tiny_llama(tmp_path)
    edit_tensors(directory / "model.safetensors", **fault)
    with pytest.raises(CheckpointError, match=next(iter(fault.values())).replace(".", r"\.")):
        load(directory)


def test_a_llama_whose_bias_was_not_declared_is_refused(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, attention_bias=True)
    edit_json(directory / "config.json", attention_bias=False)
    with pytest.raises(CheckpointError, match="q_proj"):
        load(directory)


def test_sliding_window_layers_are_refused(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    edit_json(directory / "config.json", layer_types=["full_attention"] * 3 + ["sliding_attention"])
    with pytest.raises(CheckpointError, match="full attention"):
        load(directory)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_without_an_essential_file_is_refused(tmp_path: Path, missing: str) -> None:
    directory = tiny_llama(tmp_path)
    (directory / missing).unlink()
    with pytest.raises(CheckpointError, match=str(directory)):
        load(directory)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    "spoil",
    [
        cut_short,
        lambda file: file.write_bytes(b""),
        lambda file: file.with_name("stray.safetensors").write_text("junk"),
    ],
    ids=["truncated", "empty", "stray"],
)
@pytest.mark.parametrize("toy", [tiny_llama, toy_openpangu])
def test_weights_that_are_not_whole_are_refused_by_their_file(tmp_path: Path, toy: Any, spoil: Any) -> None:
    directory = toy(tmp_path / "model")
    spoil(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{directory}: (model|stray)\.safetensors: expected a whole"):
        load(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_attention_heads", None),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("hidden_size", "x"),
        ("hidden_size", 66.0),
        ("head_dim", -16),
        ("vocab_size", VOCAB_SIZE - 1),
        ("vocab_size", True),
        ("max_position_embeddings", 0),
        ("layer_types", 5),
        ("model_type", ["llama"]),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10**400}),
        ("pad_token_id", 10**9),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(tmp_path: Path, key: str, value: object) -> None:
    """Of sizes every refusal names the key; what only transformers knows is told in its words."""
    directory = tiny_llama(tmp_path / "model")
    edit_json(directory / "config.json", **{key: value})
    named = key.endswith("_size") or "head" in key or key.startswith("max")
    with pytest.raises(CheckpointError, match=rf"^{directory}: .*{key if named else ''}"):
        load(directory)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", ["x", -3, True, [], [EOS, "x"], [EOS, -1], {"id": 2}, 2.0])
def test_ends_of_an_answer_that_are_no_ids_are_refused(tmp_path: Path, file: str, eos: object) -> None:
    directory = tiny_llama(tmp_path / "model")
    (directory / "generation_config.json").write_text("{}")
    edit_json(directory / file, eos_token_id=eos)
    with pytest.raises(CheckpointError, match=rf"{file}.*eos_token_id"):
        load(directory)


def test_an_end_that_the_tokenizer_cannot_read_is_refused(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model", vocab_size=VOCAB_SIZE + 60)
    edit_json(directory / "generation_config.json", eos_token_id=[EOS, VOCAB_SIZE - 1])
    assert load(directory).eos_token_ids == (EOS, VOCAB_SIZE - 1)
    edit_json(directory / "generation_config.json", eos_token_id=[EOS, VOCAB_SIZE])
    with pytest.raises(CheckpointError, match=rf"eos_token_id: expected ids below {VOCAB_SIZE}, .*got {VOCAB_SIZE}"):
        load(directory)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"\xff\xfe{}"),
        ("config.json", b"[" * 100_000),
        ("generation_config.json", b'{"eos_token_id": 2, "watermarking_config": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": "x"}]}'),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": {"vocab": 5}}'),
        ("tokenizer.json", b"\xff"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path, file: str, content: bytes) -> None:
    directory = tiny_llama(tmp_path / "model")
    (directory / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{directory}.*{file}"):
        load(directory)


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="expected one of cpu, cuda"):
        get_device("tpu")
