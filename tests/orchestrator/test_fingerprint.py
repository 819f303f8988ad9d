"""Both sides of the wire know a tokenizer by the same hash."""

from __future__ import annotations

import json

import pytest

from protos.fingerprint import tokenizer_sha256
from tests.orchestrator.scripted import TOKENIZER_JSON


def test_the_hash_is_the_teachers_own() -> None:
    checkpoints = pytest.importorskip("eagle_pangu.speculation.checkpoints")
    theirs = checkpoints.Tokenizer(json=TOKENIZER_JSON, chat_template="", special_tokens={})
    assert tokenizer_sha256(TOKENIZER_JSON) == theirs.sha256


def test_only_what_decides_ids_and_text_counts() -> None:
    document = json.loads(TOKENIZER_JSON)
    same = json.dumps({**document, "truncation": {"max_length": 3}, "version": "2.0"}, indent=1).encode()
    other = json.dumps({**document, "normalizer": {"type": "Lowercase"}}).encode()
    assert tokenizer_sha256(same) == tokenizer_sha256(TOKENIZER_JSON) != tokenizer_sha256(other)
