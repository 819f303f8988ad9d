"""Tiny random checkpoints with a real tokenizer, written as transformers directories."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 260
EOS = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_tokenizer() -> Tokenizer:
    """256 byte tokens and four special ones: every text has ids, every id sequence has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<pad>"])
    return tokenizer


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": 259,
    "tie_word_embeddings": False,
    # Random weights of this scale give logits with clear winners, so that float32 ids have no near-ties.
    "initializer_range": 0.2,
}

ARCHITECTURES = {
    "llama": lambda **kw: LlamaForCausalLM(LlamaConfig(**kw)),
    "llama-bias": lambda **kw: LlamaForCausalLM(LlamaConfig(attention_bias=True, **kw)),
    "qwen2": lambda **kw: Qwen2ForCausalLM(Qwen2Config(**kw)),
    "qwen3": lambda **kw: Qwen3ForCausalLM(Qwen3Config(**kw)),
}


def tiny_model(directory: Path, architecture: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint of that architecture into `directory` (made if missing) and return it."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture](**{**SHAPE, **changes})
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHAT_TEMPLATE})
    )
    return directory


def tiny_llama(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """`tiny_model` with the Llama architecture."""
    return tiny_model(directory, "llama", seed, **changes)
