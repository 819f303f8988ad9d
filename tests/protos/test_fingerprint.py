"""Two copies of one tokenizer are known by one hash, whoever saved them; two tokenizers by two."""

import json

import pytest

from protos.fingerprint import DECIDING, tokenizer_sha256

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 2, "content": "<end>"}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel"},
    "post_processor": None,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "é": 1}, "merges": []},
}


def sha256_of(tokenizer: object, **formatting: object) -> str:
    return tokenizer_sha256(json.dumps(tokenizer, **formatting).encode())


def test_format_order_and_settings_of_the_caller_do_not_count() -> None:
    reordered = dict(reversed(TOKENIZER.items())) | {"padding": {"length": 8}, "truncation": {"max_length": 4}}
    assert sha256_of(reordered, indent=2, ensure_ascii=False) == sha256_of(TOKENIZER)
    assert len(sha256_of(TOKENIZER)) == 64


@pytest.mark.parametrize("part", DECIDING)
def test_each_deciding_part_counts(part: str) -> None:
    assert sha256_of(TOKENIZER | {part: {"type": "another"}}) != sha256_of(TOKENIZER)


@pytest.mark.parametrize("broken", [b"", b"[]", b"{", b"\xff"])
def test_what_is_no_tokenizer_is_refused(broken: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - JSON errors are ValueErrors of several kinds
        tokenizer_sha256(broken)
