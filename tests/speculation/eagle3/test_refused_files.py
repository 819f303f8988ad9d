"""Tensors and files that are missing, left over, misshapen or contradictory: refused by name, never half-loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle_pangu.speculation.eagle3.formats import load_head
from tests.speculation.eagle3.checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    Layout,
    d2t,
    embeddings,
    modelopt,
    safeailab,
    specforge,
    t2d,
)
from tests.speculation.eagle3.refusing import refusal, refusal_of


@pytest.mark.parametrize("name", [name for name in safeailab().tensors if name not in ("d2t", "t2d")])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    layout = safeailab()
    del layout.tensors[name]
    assert f"missing ['{name}']" in refusal_of(layout, tmp_path)


@pytest.mark.parametrize("producer", [safeailab, modelopt])
def test_a_missing_map_of_a_part_of_the_vocabulary_is_named(producer: Callable[[], Layout], tmp_path: Path) -> None:
    layout = producer()
    del layout.tensors["d2t"]
    assert f"d2t: expected int64 [{DRAFT_VOCAB}] into {VOCAB} ids, found none" in refusal_of(layout, tmp_path)


@pytest.mark.parametrize("name", list(specforge().tensors))
def test_a_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    layout = specforge()
    layout.tensors[name] = torch.cat([layout.tensors[name], layout.tensors[name]])
    text = refusal_of(layout, tmp_path)
    assert f"{name}: expected" in text
    assert str(list(layout.tensors[name].shape)) in text


@pytest.mark.parametrize(
    ("producer", "name"),
    [
        (safeailab, "midlayer.self_attn.q_proj.bias"),
        (safeailab, "fc.bias"),
        (safeailab, "midlayer.self_attn.q_norm.weight"),
        (safeailab, "layers.1.mlp.up_proj.weight"),
        (safeailab, "fc_norm.0.weight"),
        (safeailab, "input_norm.weight"),
        (safeailab, "layer.q_proj.weight"),
        (safeailab, "mask_hidden"),
        (specforge, "fc_norm.3.weight"),
        (specforge, "input_norm.weight"),
        (modelopt, "fc_norm.0.weight"),
    ],
)
def test_a_tensor_that_the_configuration_does_not_account_for_is_named(
    producer: Callable[[], Layout], name: str, tmp_path: Path
) -> None:
    layout = producer()
    layout.tensors[name] = torch.zeros(3)
    assert f"unexpected ['{name}']" in refusal_of(layout, tmp_path)


def test_two_tensors_of_one_meaning_are_refused(tmp_path: Path) -> None:
    layout = safeailab()
    layout.tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, HIDDEN)
    text = refusal_of(layout, tmp_path)
    assert "midlayer.mlp.up_proj.weight" in text
    assert "found a second" in text


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    layout = safeailab()
    layout.tensors["fc.weight"] = layout.tensors["fc.weight"].to(torch.int8)
    assert "fc.weight: expected floating point" in refusal_of(layout, tmp_path)


def falling() -> torch.Tensor:
    offsets = d2t()
    offsets[3] = offsets[2] - 1
    return offsets


def beyond(row: int, target_id: int) -> torch.Tensor:
    offsets = d2t()
    offsets[row] = target_id - row
    return offsets


def other_mask() -> torch.Tensor:
    mask = t2d()
    mask[5] = ~mask[5]
    return mask


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("d2t", falling(), "expected ascending ids"),
        (
            "d2t",
            beyond(DRAFT_VOCAB - 1, VOCAB),
            f"expected ids below {VOCAB}, found {VOCAB} at draft id {DRAFT_VOCAB - 1}",
        ),
        ("d2t", beyond(0, -1), "found -1 at draft id 0"),
        ("d2t", d2t()[:-1].clone(), f"expected int64 [{DRAFT_VOCAB}], found int64 [{DRAFT_VOCAB - 1}]"),
        ("d2t", d2t().float(), f"found float32 [{DRAFT_VOCAB}]"),
        ("t2d", other_mask(), "at id 5"),
        ("t2d", torch.zeros(VOCAB, dtype=torch.bool), "expected the ids of d2t, found False"),
        ("t2d", t2d()[:-1].clone(), f"found bool [{VOCAB - 1}]"),
        ("t2d", t2d().long(), f"found int64 [{VOCAB}]"),
    ],
)
def test_a_vocabulary_that_cannot_be_meant_is_refused(
    name: str, tensor: torch.Tensor, said: str, tmp_path: Path
) -> None:
    layout = safeailab()
    layout.tensors[name] = tensor
    text = refusal_of(layout, tmp_path)
    assert f"{name}: " in text
    assert said in text


def test_absolute_ids_in_the_place_of_offsets_are_refused(tmp_path: Path) -> None:
    layout = safeailab()
    layout.tensors["d2t"] = d2t() + torch.arange(DRAFT_VOCAB)
    assert f"d2t: expected ids below {VOCAB}" in refusal_of(layout, tmp_path)


@pytest.mark.parametrize(("given", "said"), [(None, "found none"), (torch.zeros(VOCAB + 4, HIDDEN), "of the teacher")])
def test_embeddings_that_neither_file_nor_teacher_has_are_named(
    given: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    text = refusal(safeailab().write(tmp_path), given)
    assert f"embed_tokens.weight: expected [{VOCAB}, {HIDDEN}]" in text
    assert said in text


def remove(file: str) -> Callable[[Path], None]:
    return lambda directory: (directory / file).unlink()


def overwrite(file: str, content: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / file).write_bytes(content)

    return write


def pickled(content: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        torch.save(content, directory / "pytorch_model.bin")

    return write


def sharded(weight_map: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "shard.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


class Arbitrary:
    """Something that only unpickling code could bring back."""


ALL = dict.fromkeys(safeailab().tensors, "shard.safetensors")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (remove("config.json"), "config.json"),
        (overwrite("config.json", b"{"), "config.json: expected JSON"),
        (overwrite("config.json", b"[]"), "config.json: expected an object, found list"),
        (remove("model.safetensors"), "expected model.safetensors, model.safetensors.index.json or pytorch_model.bin"),
        (overwrite("model.safetensors", b"no"), "model.safetensors: cannot be read"),
        (pickled({"fc.weight": Arbitrary()}), "pytorch_model.bin: cannot be read"),
        (pickled({"state_dict": {"fc.weight": torch.zeros(2)}}), "pytorch_model.bin: expected a dictionary of tensors"),
        (pickled([torch.zeros(2)]), "pytorch_model.bin: expected a dictionary of tensors"),
        (sharded({**ALL, "extra.weight": "shard.safetensors"}), "shard.safetensors: expected the tensors"),
        (sharded({name: file for name, file in ALL.items() if name != "d2t"}), "a difference in ['d2t']"),
        (sharded({**ALL, "norm.weight": "other.safetensors"}), "other.safetensors: cannot be read"),
        (sharded(3), "model.safetensors.index.json: expected a weight_map"),
        (sharded({"norm.weight": 3}), "model.safetensors.index.json: expected a weight_map"),
    ],
)
def test_files_that_are_missing_or_broken_are_named(
    break_it: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    safeailab().write(tmp_path)
    break_it(tmp_path)
    assert said in refusal(tmp_path, embeddings())


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert "config.json: expected" in refusal(tmp_path / "nowhere", embeddings())


def test_shards_beside_a_single_file_are_not_mixed_into_it(tmp_path: Path) -> None:
    safeailab().write(tmp_path)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "shard.safetensors")
    index = {"weight_map": {"fc.weight": "shard.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    head = load_head(tmp_path, embeddings=embeddings())
    assert torch.equal(head.fc.weight, safeailab().tensors["fc.weight"])
