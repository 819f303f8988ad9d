"""openPangu-Embedded as a Llama with attention biases: the same logits, and nothing that would compute otherwise."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from eagle_pangu.speculation.checkpoints import Checkpoint, CheckpointError, load_checkpoint, read_tokenizer
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.licences import OPENPANGU
from eagle_pangu.speculation.openpangu import OpenPanguError, check_dropped_tensors, llama_config
from tests.openpangu import CHAT_TEMPLATE, EOS, configuration, library, tensors, tokenizer_settings, toy_openpangu

IDS = [1, 20, 31, 300, 7, 430, 31, 20, 99]


def load(directory: Path) -> Checkpoint:
    return load_checkpoint(directory, torch.float32, get_device("cpu"))


def logits_of(directory: Path, ids: list[int]) -> torch.Tensor:
    device = get_device("cpu")
    engine = Engine(load(directory), device, slot_capacity=64, numerics="free")
    segment = engine.prefill(engine.open_slot(), torch.tensor(ids).numpy(), want_logits=True)
    assert segment.logits is not None
    return segment.logits


def written_out(document: dict[str, Any], weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """[vocab_size] logits after the last id, from the architecture's description alone, one row after the other."""
    heads, kv_heads = document["num_attention_heads"], document["num_key_value_heads"]
    width = document["hidden_size"] // heads

    def normed(rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + document["rms_norm_eps"]).sqrt() * weights[f"{name}.weight"]

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        product = rows @ weights[f"{name}.weight"].T
        return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product

    def turned(rows: torch.Tensor) -> torch.Tensor:
        """Pairs (i, i + width / 2) of each head turned by position times theta^(-2i/width)."""
        half = width // 2
        speeds = torch.tensor([document["rope_theta"] ** (-2 * pair / width) for pair in range(half)])
        angle = torch.arange(rows.shape[0])[:, None, None] * speeds
        left, right = rows[..., :half], rows[..., half:]
        cosine, sine = angle.cos(), angle.sin()
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)

    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(document["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        rows = normed(hidden, f"{place}.input_layernorm")
        query = turned(linear(rows, f"{place}.self_attn.q_proj").view(-1, heads, width))
        key = turned(linear(rows, f"{place}.self_attn.k_proj").view(-1, kv_heads, width))
        value = linear(rows, f"{place}.self_attn.v_proj").view(-1, kv_heads, width)
        attended = torch.zeros_like(query)
        for row in range(len(ids)):
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = key[: row + 1, shared] @ query[row, head] / width**0.5
                attended[row, head] = scores.softmax(0) @ value[: row + 1, shared]
        hidden = hidden + linear(attended.flatten(1), f"{place}.self_attn.o_proj")
        rows = normed(hidden, f"{place}.post_attention_layernorm")
        inner = F.silu(linear(rows, f"{place}.mlp.gate_proj")) * linear(rows, f"{place}.mlp.up_proj")
        hidden = hidden + linear(inner, f"{place}.mlp.down_proj")
    head = "model.embed_tokens" if document["tie_word_embeddings"] else "lm_head"
    return linear(normed(hidden, "model.norm")[-1], head)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_logits_are_those_of_the_architecture_written_out(tmp_path: Path, tied: bool, bias: bool) -> None:
    document = configuration(tie_word_embeddings=tied, bias=bias)
    directory = toy_openpangu(tmp_path / "pangu", tie_word_embeddings=tied, bias=bias)
    vocab_size = library().get_piece_size()
    expected = written_out(document, tensors(document), IDS)[:vocab_size]
    torch.testing.assert_close(logits_of(directory, IDS)[-1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_every_bias_moves_the_logits(tmp_path: Path, projection: str) -> None:
    document = configuration()
    weights = tensors(document)
    before = logits_of(toy_openpangu(tmp_path / "one"), IDS)
    moved = torch.arange(weights[f"model.layers.1.self_attn.{projection}.bias"].numel()).float() / 7
    after = logits_of(
        toy_openpangu(tmp_path / "two", weights={**weights, f"model.layers.1.self_attn.{projection}.bias": moved}), IDS
    )
    assert not torch.allclose(before, after, atol=1e-2)


def test_a_checkpoint_knows_what_identifies_it(tmp_path: Path) -> None:
    checkpoint = load(toy_openpangu(tmp_path / "pangu"))
    assert checkpoint.eos_token_ids == (library().piece_to_id(EOS),)
    assert checkpoint.vocab_size == library().get_piece_size()  # twelve rows of the embedding are padding
    assert checkpoint.context_limit == 512
    assert checkpoint.tokenizer.adds_bos
    assert checkpoint.tokenizer.chat_template == CHAT_TEMPLATE
    assert checkpoint.tokenizer.special_tokens["eos_token"] == EOS


def test_only_tokens_with_a_role_have_no_text(tmp_path: Path) -> None:
    """tokenizer_config.json calls all its added tokens special; those that bracket a thought are part of an answer."""
    settings = tokenizer_settings(additional_special_tokens=["[unused9]"])
    document = json.loads(read_tokenizer(toy_openpangu(tmp_path / "pangu", settings=settings)).json)
    special = {token["content"]: token["special"] for token in document["added_tokens"]}
    assert {content for content, is_special in special.items() if is_special} == {"<unk>", "<s>", EOS, "[unused9]"}
    assert special.keys() > {"</s>", "[unused16]", "[unused17]"}


def test_the_end_of_an_answer_may_come_from_the_generation_configuration(tmp_path: Path) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [45, 46]}))
    assert load(directory).eos_token_ids == (45, 46)


def test_the_code_beside_the_weights_is_never_run(tmp_path: Path) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    for name in ("configuration_openpangu_dense", "modeling_openpangu_dense", "tokenization_openpangu"):
        (directory / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(9)\n")
    load(directory)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "key",
    ["sliding_window", "layer_types", "param_sink_number", "partial_rotary_factor", "qk_nope_dim", "rope_scaling"],
)
def test_an_unknown_key_is_refused_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"unknown key '{key}'"):
        load(toy_openpangu(tmp_path / "pangu", **{key: 1}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bias", None),
        ("bias", "true"),
        ("bias", 1),
        ("tie_word_embeddings", 0),
        ("rope_theta", 0),
        ("rope_theta", True),
        ("rms_norm_eps", "1e-5"),
        ("hidden_size", 64.0),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("hidden_act", "gelu"),
        ("head_dim", 0),
        ("head_dim", 17),
        ("hidden_size", 68),
        ("rope_theta", 10**400),
        ("eos_token_id", None),
        ("eos_token_id", []),
        ("bos_token_id", -1),
        ("bos_token_id", 5),
        ("pad_token_id", "0"),
        ("pad_token_id", 10**9),
        ("architectures", ["PanguProMoEForCausalLM"]),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_its_key(tmp_path: Path, key: str, value: object) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    (directory / "config.json").write_text(json.dumps(configuration(**{key: value})))
    with pytest.raises(CheckpointError, match=f"config.json: {key}: expected .*, got"):
        load(directory)


@pytest.mark.parametrize("key", ["bias", "rope_theta", "eos_token_id", "num_key_value_heads", "architectures"])
def test_a_key_that_decides_and_is_missing_is_named(tmp_path: Path, key: str) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    document = configuration()
    del document[key]
    (directory / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=f"config.json: {key}: expected a value, found none"):
        load(directory)


def frequencies() -> torch.Tensor:
    """Those of the toy, per pair of values of a head."""
    return tensors(configuration())["model.layers.1.self_attn.rotary_emb.inv_freq"]


def changed(weights: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    merged = {**weights, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__layers__0__self_attn__o_proj__bias": None}, "self_attn.o_proj.bias"),
        ({"model__layers__0__mlp__up_proj__bias": torch.zeros(96)}, "mlp.up_proj.bias"),
        ({"model__layers__0__self_attn__param_sink_key": torch.zeros(4)}, "param_sink_key"),
        ({"model__layers__1__self_attn__rotary_emb__inv_freq": torch.ones(8)}, "frequencies of rope_theta 1.6e"),
        ({"model__layers__1__self_attn__rotary_emb__inv_freq": torch.ones(7)}, "frequencies of rope_theta 1.6e"),
        ({"model__layers__1__self_attn__rotary_emb__inv_freq": 1.01 * frequencies()}, "frequencies of rope_theta 1.6e"),
        ({"model__rotary_emb__inv_freq": torch.ones(8)}, "model.rotary_emb.inv_freq: expected the 8 frequencies"),
        ({"model__rotary_emb__inv_freq_old": torch.ones(8)}, "model.rotary_emb.inv_freq_old: expected the 8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    weights = changed(tensors(configuration()), **changes)
    with pytest.raises(CheckpointError, match=said):
        load(toy_openpangu(tmp_path / "pangu", weights=weights))


def test_every_file_of_a_model_in_parts_is_looked_at(tmp_path: Path) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    save_file({"model.rotary_emb.inv_freq": torch.ones(8)}, directory / "model-00002-of-00002.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    with pytest.raises(OpenPanguError, match="model-00002-of-00002"):
        check_dropped_tensors(directory, llama_config(configuration()))


def test_a_head_of_another_width_than_its_share_of_the_model_is_taken_as_it_is_given() -> None:
    assert llama_config(configuration(head_dim=24)).head_dim == 24


def test_a_bias_that_was_not_declared_is_refused(tmp_path: Path) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    (directory / "config.json").write_text(json.dumps(configuration(bias=False)))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        load(directory)


def test_frequencies_as_stored_in_bfloat16_are_those_of_the_configuration(tmp_path: Path) -> None:
    weights = tensors(configuration())
    rounded = {name: tensor.bfloat16() if "inv_freq" in name else tensor for name, tensor in weights.items()}
    load(toy_openpangu(tmp_path / "pangu", weights=rounded))


def test_a_tied_model_whose_file_holds_another_head_is_refused(tmp_path: Path) -> None:
    weights = tensors(configuration(tie_word_embeddings=True))
    embeddings = weights["model.embed_tokens.weight"]
    same, other = ({**weights, "lm_head.weight": embeddings + difference} for difference in (0, 1))
    load(toy_openpangu(tmp_path / "same", tie_word_embeddings=True, weights=same))
    directory = toy_openpangu(tmp_path / "other", tie_word_embeddings=True, weights=other)
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true"):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"add_bos_token": "yes"}, "add_bos_token: expected true or false, got 'yes'"),
        ({"add_eos_token": True}, "add_eos_token: expected False, got True"),
        ({"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs"),
        ({"tokenizer_class": "LlamaTokenizer"}, "tokenizer_class: expected 'PanguTokenizer'"),
        ({"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces"),
        ({"decode_with_prefix_space": True}, "decode_with_prefix_space: expected False"),
        ({"additional_special_tokens": 5}, "additional_special_tokens: expected a list, got 5"),
        ({"added_tokens_decoder": None}, "added_tokens_decoder: expected an object, got None"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder: expected an object"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "<s>"}}}, "the tokenizer cannot be read"),
        ({"bos_token": None}, "bos_token: expected one of added_tokens_decoder"),
        ({"eos_token": "</end>"}, "'</end>' is not"),
        ({"added_tokens_decoder": {"x": {"content": "<s>"}}}, "expected an id and its content"),
        *(
            ({"added_tokens_decoder": {"1": {"content": "<s>", flag: True}}}, f"{flag}: expected false")
            for flag in ("lstrip", "rstrip", "single_word", "normalized")
        ),
        ({"added_tokens_decoder": {"1": {"content": "</s>"}}}, "."),
    ],
)
def test_tokenizer_settings_that_would_change_ids_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_tokenizer(toy_openpangu(tmp_path / "pangu", settings=tokenizer_settings(**changes)))


def test_an_absent_add_bos_token_is_true_as_in_the_tokenizer_class(tmp_path: Path) -> None:
    settings = tokenizer_settings()
    del settings["add_bos_token"]
    assert read_tokenizer(toy_openpangu(tmp_path / "one", settings=settings)).adds_bos
    settings = tokenizer_settings(add_bos_token=False)
    assert not read_tokenizer(toy_openpangu(tmp_path / "two", settings=settings)).adds_bos


def test_a_directory_without_its_sentencepiece_file_or_weights_is_refused(tmp_path: Path) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    (directory / "tokenizer.model").rename(directory / "other.model")
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.model"):
        load(directory)
    (directory / "other.model").rename(directory / "tokenizer.model")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"\.safetensors, found none"):
        load(directory)


def test_the_licence_is_said_once_where_the_model_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = toy_openpangu(tmp_path / "pangu")
    with caplog.at_level(logging.WARNING):
        load(directory)
        load(directory)
    said = [record.getMessage() for record in caplog.records if "licence" in record.getMessage()]
    assert said == [f"licence of pangu: {OPENPANGU}"]
    assert "European Union" in OPENPANGU
    assert "Powered by openPangu" in OPENPANGU
