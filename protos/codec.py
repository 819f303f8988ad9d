"""Between messages and plain values: the only module that knows both a .proto message and an array.

It checks what the encoding itself can get wrong (lengths, byte counts); the rules of a token tree are the tree's own
(`eagle_pangu.speculation.tree`). No torch: features stay bytes, bfloat16 as the wire has it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protos.errors import InvalidFieldError
from protos.v1 import generation_pb2, model_pb2, sampling_pb2, tree_pb2

BFLOAT16_BYTES = 2


class TreeArrays(NamedTuple):
    """A token tree as it came off the wire, unchecked but for its lengths.

    token_ids: [rows] int64; parents: [rows] int64; scores: [rows] float32 or None when the message has none.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    scores: NDArray[np.float32] | None


def decode_tree(message: tree_pb2.TokenTree) -> TreeArrays:
    """The arrays of a tree message; `TokenTree(*decode_tree(m))` then `validate` is how a service reads one."""
    return TreeArrays(
        np.array(message.token_ids, dtype=np.int64),
        np.array(message.parents, dtype=np.int64),
        np.array(message.scores, dtype=np.float32) if message.scores else None,
    )


def encode_tree(
    token_ids: NDArray[np.int64], parents: NDArray[np.int64], scores: NDArray[np.float32] | None = None
) -> tree_pb2.TokenTree:
    """The message of a tree; four bytes a row for parents, never a dense mask."""
    return tree_pb2.TokenTree(
        token_ids=token_ids.tolist(), parents=parents.tolist(), scores=[] if scores is None else scores.tolist()
    )


def encode_features(start: int, data: NDArray[np.uint16]) -> tree_pb2.Features:
    """Features from the bits of [count, width] bfloat16 values."""
    return tree_pb2.Features(start=start, count=data.shape[0], data=data.astype("<u2", copy=False).tobytes())


def decode_features(message: tree_pb2.Features, feature_width: int) -> NDArray[np.uint16]:
    """[count, feature_width] bits of bfloat16 values.

    Raises:
        InvalidFieldError: the byte count does not match, or there is no value at all.
    """
    expected = message.count * feature_width * BFLOAT16_BYTES
    if expected == 0 or len(message.data) != expected:
        raise InvalidFieldError(
            "features.data",
            f"expected {message.count} x {feature_width} bfloat16 = {expected} bytes, got {len(message.data)}",
        )
    return np.frombuffer(message.data, dtype="<u2").reshape(message.count, feature_width)


def decode_sampling(message: sampling_pb2.Sampling | generation_pb2.GenerationOptions) -> dict[str, Any]:
    """How tokens are decided, as far as both messages say it under the same names: field to value, unchecked.

    `top_p` and `repetition_penalty` are 1 where absent. seed, logit_bias and the ids that end an answer are apart.
    """
    plain = ("temperature", "top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens")
    return {
        **{name: getattr(message, name) for name in plain},
        "top_p": message.top_p if message.HasField("top_p") else 1.0,
        "repetition_penalty": message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        "bad_words": tuple(tuple(word.token_ids) for word in message.bad_words),
        "allowed_token_ids": tuple(message.allowed_token_ids),
    }


def fingerprint_differences(ours: model_pb2.ModelFingerprint, theirs: model_pb2.ModelFingerprint) -> list[str]:
    """Each compared field that differs, as ``field: ours / theirs``; empty when the two speak the same ids."""
    compared = ("tokenizer_sha256", "vocab_size", "eos_token_ids")
    return [
        f"{name}: {getattr(ours, name)} / {getattr(theirs, name)}"
        for name in compared
        if getattr(ours, name) != getattr(theirs, name)
    ]
