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


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="expected one of cpu, cuda"):
        get_device("tpu")
