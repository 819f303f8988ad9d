"""A teacher that says a text of our choice, in tokens that begin and end anywhere inside its characters.

A real checkpoint: attention and MLP add nothing, so each token decides the next one; the tokenizer has a token of its
own for every piece of the text, which makes the text a walk over ids that never comes back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.models import tiny_llama

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<pad>"]
WIDTH = 64


def pieces_of(text: str) -> list[bytes]:
    """The text cut into the shortest pieces of bytes that are all different."""
    data, pieces = text.encode(), []
    start = 0
    while start < len(data):
        end = start + 1
        while end < len(data) and data[start:end] in pieces:
            end += 1
        pieces.append(data[start:end])
        start = end
    assert len(set(pieces)) == len(pieces), "the end of the text repeats a piece: end it with a letter of its own"
    return pieces


def speaking_tokenizer(text: str) -> tuple[Tokenizer, list[int]]:
    """A byte-level tokenizer with the pieces among its tokens, and their ids in the order of the text."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(level.alphabet()))}
    symbols = bytes_to_unicode()
    spelled = ["".join(symbols[byte] for byte in piece) for piece in pieces_of(text)]
    for piece in spelled:
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer, [vocabulary[piece] for piece in spelled]


def speaking_model(directory: Path, text: str) -> Path:
    """Write the checkpoint: after the prompt of one pad token it says the text, then ends."""
    tokenizer, ids = speaking_tokenizer(text)
    start = tokenizer.token_to_id("<pad>")
    end = tokenizer.token_to_id("<|im_end|>")
    size = tokenizer.get_vocab_size()
    tiny_llama(directory, vocab_size=size, num_hidden_layers=1, eos_token_id=end, pad_token_id=start, bos_token_id=None)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0))
        embeddings /= embeddings.norm(dim=-1, keepdim=True)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, following in zip([start, *ids], [*ids, end], strict=True):
            model.lm_head.weight[following] = embeddings[token]
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
