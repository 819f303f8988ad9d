"""What a tokenizer is known by between services; each side computes it from its own copy.

No torch and no tokenizers: the canonical form is read from tokenizer.json itself.
"""

from __future__ import annotations

import hashlib
import json

DECIDING = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
"""The parts of tokenizer.json that decide ids and text; truncation, padding and post-processing are the caller's."""


def tokenizer_sha256(tokenizer_json: bytes) -> str:
    """Lower-case hex SHA-256 of the canonical tokenizer: the same for copies saved by different library versions.

    Raises:
        ValueError: the bytes are not a JSON object.
    """
    document = json.loads(tokenizer_json)
    if not isinstance(document, dict):
        raise ValueError("tokenizer.json: expected a JSON object")
    deciding = {key: document.get(key) for key in DECIDING}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
