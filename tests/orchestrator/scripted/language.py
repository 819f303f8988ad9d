"""The language of the scripted services: a tokenizer with one id a byte, and what a teacher may say in it.

The next token is a function of the whole history, so that one wrong token, length or commit anywhere gives a wrong
answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 257
VOCAB_SIZE = 258
FEATURE_WIDTH = 4
CONTEXT_LIMIT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

NextToken = Callable[[Sequence[int]], int]


def byte_tokenizer() -> Tokenizer:
    """One id a byte, and two special ones: every byte sequence is a text, every text has ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


TOKENIZER = byte_tokenizer()
TOKENIZER_JSON = TOKENIZER.to_str().encode()


def ids_of(text: str) -> list[int]:
    """Ids of raw text."""
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def scrambled(history: Sequence[int]) -> int:
    """A byte that depends on every token before it; never a special one."""
    digest = hashlib.blake2b(repr(list(history)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") % 256


def saying(prompt_tokens: int, answer: Sequence[int]) -> NextToken:
    """A teacher that gives this answer to prompts of that length, and scrambles after a history that left it."""

    def next_token(history: Sequence[int]) -> int:
        said = list(history[prompt_tokens:])
        if len(said) < len(answer) and said == list(answer[: len(said)]):
            return answer[len(said)]
        return scrambled(history)

    return next_token


def plain(next_token: NextToken, prompt: Sequence[int], tokens: int) -> list[int]:
    """The teacher-only answer, without end."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(next_token(history))
    return history[len(prompt) :]
