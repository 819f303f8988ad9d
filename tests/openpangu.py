"""A toy openPangu-Embedded directory: the real keys, tensor names and files, over a small SentencePiece model."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

MARKS = [f"[unused{number}]" for number in range(18)]
BOS, EOS = "<s>", "[unused10]"
CONTROLS = ["<unk>", BOS, "</s>"]
ROLES = {"bos_token": BOS, "eos_token": EOS, "pad_token": "<unk>", "unk_token": "<unk>"}

CHAT_TEMPLATE = (
    "{%- set names = {'system': '系统', 'user': '用户', 'assistant': '助手'} -%}"
    "{%- if messages[0].role != 'system' %}{{ '[unused9]系统：[unused10]' }}{% endif -%}"
    "{%- for message in messages %}"
    "{{ '[unused9]' ~ names[message.role] ~ '：' ~ message.content ~ '[unused10]' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '[unused9]助手：' }}{% endif -%}"
)

SENTENCES = [
    "The capital of France is Paris, and the river there is the Seine.",
    "def add(first, second):\n    return first + second\n",
    "今天天气很好，我们去公园散步。",
    "请问北京的首都是哪里？系统、用户、助手：人工智能正在改变世界。",
    "two  spaces,   three; 3.14 times 2 != 6",
]


@cache
def sentencepiece_model(*, dummy_prefix: bool = True, **changes: Any) -> bytes:
    """A BPE model over bytes as the real one is: no normalisation, spaces kept, the marks among its pieces."""
    file = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 440,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ",".join(MARKS),
        "character_coverage": 0.98,
        "pad_id": -1,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=file,
        add_dummy_prefix=dummy_prefix,
        minloglevel=2,
        hard_vocab_limit=False,
        **{**settings, **changes},
    )
    return file.getvalue()


def library(**changes: Any) -> SentencePieceProcessor:
    """The sentencepiece library's own reading of the model."""
    return SentencePieceProcessor(model_proto=sentencepiece_model(**changes))


def tokenizer_settings(**changes: Any) -> dict[str, Any]:
    """tokenizer_config.json with the real one's keys."""
    pieces = library()
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(pieces.piece_to_id(content)): {"content": content, **flags} for content in (*CONTROLS, *MARKS)}
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": True,
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_openpangu.PanguTokenizer", None]},
        **ROLES,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 10**30,
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": False,
        "tokenizer_class": "PanguTokenizer",
        "use_default_system_prompt": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {**settings, **changes}


def configuration(**changes: Any) -> dict[str, Any]:
    """config.json with exactly the real one's keys, of a toy size."""
    document = {
        "architectures": ["PanguEmbeddedForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_openpangu_dense.PanguEmbeddedConfig",
            "AutoModel": "modeling_openpangu_dense.PanguEmbeddedModel",
            "AutoModelForCausalLM": "modeling_openpangu_dense.PanguEmbeddedForCausalLM",
        },
        "bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": library().piece_to_id(EOS),
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "model_type": "PanguEmbedded",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 16000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.53.2",
        "use_cache": True,
        "vocab_size": library().get_piece_size() + 12,
    }
    return {**document, **changes}


def tensors(document: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the checkpoint's names, the frequencies of every layer and all biases among them."""
    chance = torch.Generator().manual_seed(seed)
    hidden, inner, heads = document["hidden_size"], document["intermediate_size"], document["num_attention_heads"]
    head_dim = hidden // heads
    narrow = document["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (document["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not document["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (document["vocab_size"], hidden)
    for layer in range(document["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for name, (outputs, inputs) in {
            "q_proj": (hidden, hidden),
            "k_proj": (narrow, hidden),
            "v_proj": (narrow, hidden),
            "o_proj": (hidden, hidden),
        }.items():
            shapes[f"{place}.self_attn.{name}.weight"] = (outputs, inputs)
            if document["bias"]:
                shapes[f"{place}.self_attn.{name}.bias"] = (outputs,)
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            shapes[f"{place}.mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{place}.{name}.weight"] = (hidden,)
    # Of this scale random weights give logits with clear winners.
    weights = {name: 0.2 * torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    weights = {name: 1 + weight if "norm" in name else weight for name, weight in weights.items()}
    frequencies = document["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    for layer in range(document["num_hidden_layers"]):
        weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies.clone()
    return weights


def toy_openpangu(
    directory: Path,
    *,
    settings: dict[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write the directory; changes: of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    document = configuration(**changes)
    (directory / "config.json").write_text(json.dumps(document))
    (directory / "tokenizer.model").write_bytes(sentencepiece_model())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings or tokenizer_settings()))
    save_file(weights or tensors(document), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
