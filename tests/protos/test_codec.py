"""What is encoded comes back as it was, and a length that disagrees is refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_features, decode_tree, encode_features, encode_tree, fingerprint_differences
from protos.errors import InvalidFieldError
from protos.v1 import model_pb2, tree_pb2
from tests.trees import token_trees, wire_trees

features_arrays = hnp.arrays(np.uint16, st.tuples(st.integers(1, 5), st.integers(1, 7)))


@given(token_trees(vocab_size=2**32))
def test_a_tree_survives_the_wire(tree: TokenTree) -> None:
    sent = encode_tree(tree.token_ids, tree.parents, tree.scores).SerializeToString()
    received = TokenTree(*decode_tree(tree_pb2.TokenTree.FromString(sent)))
    assert np.array_equal(received.token_ids, tree.token_ids)
    assert np.array_equal(received.parents, tree.parents)
    assert (received.scores is None) == (tree.scores is None)
    if tree.scores is not None and received.scores is not None:
        assert received.scores.tobytes() == tree.scores.tobytes()


@given(wire_trees())
def test_decoding_a_tree_keeps_every_value_and_the_documented_types(message: tree_pb2.TokenTree) -> None:
    arrays = decode_tree(message)
    assert (arrays.token_ids.dtype, arrays.parents.dtype) == (np.int64, np.int64)
    assert arrays.token_ids.tolist() == list(message.token_ids)
    assert arrays.parents.tolist() == list(message.parents)
    assert arrays.scores is None if not message.scores else arrays.scores is not None
    if arrays.scores is not None:
        assert arrays.scores.dtype == np.float32
        assert np.array_equal(arrays.scores, np.array(message.scores, np.float32), equal_nan=True)


def test_a_mask_never_crosses_the_wire() -> None:
    rows = 64
    message = encode_tree(np.zeros(rows, np.int64), np.maximum(np.arange(rows) - 1, 0))
    assert message.ByteSize() < 3 * rows  # ids and parents; a mask alone would take rows * rows / 8


@pytest.mark.parametrize("column", ["token_ids", "parents"])
def test_a_negative_number_cannot_be_encoded(column: str) -> None:
    arrays = {"token_ids": np.array([1, 2]), "parents": np.array([0, 0])}
    arrays[column] = np.array([0, -1])
    with pytest.raises(ValueError, match="-1"):
        encode_tree(**arrays)


@given(st.integers(0, 2**32 - 1), features_arrays)
def test_features_survive_the_wire_bit_by_bit(start: int, bits: np.ndarray) -> None:
    sent = encode_features(start, bits).SerializeToString()
    message = tree_pb2.Features.FromString(sent)
    assert (message.start, message.count) == (start, len(bits))
    assert np.array_equal(decode_features(message, bits.shape[1]), bits)


def test_features_are_little_endian_whatever_this_machine_is() -> None:
    one_and_minus_two = np.array([[0x3F80, 0xC000]], dtype=">u2")
    assert encode_features(0, one_and_minus_two).data == b"\x80\x3f\x00\xc0"


@given(
    st.builds(tree_pb2.Features, count=st.integers(0, 2**32 - 1), data=st.binary(max_size=64)), st.integers(0, 2**16)
)
def test_features_of_any_other_byte_count_are_refused(message: tree_pb2.Features, width: int) -> None:
    if width and message.count and len(message.data) == 2 * message.count * width:
        assert decode_features(message, width).shape == (message.count, width)
        return
    with pytest.raises(InvalidFieldError, match="bytes, got") as caught:
        decode_features(message, width)
    assert caught.value.field == "features.data"


FINGERPRINT = model_pb2.ModelFingerprint(
    model="a", tokenizer_sha256="0" * 64, vocab_size=100, eos_token_ids=[2, 3], feature_width=96, context_limit=512
)


def test_equal_fingerprints_have_no_difference() -> None:
    assert fingerprint_differences(FINGERPRINT, FINGERPRINT) == []


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"tokenizer_sha256": "1" * 64}, f"tokenizer_sha256: {'0' * 64} / {'1' * 64}"),
        ({"vocab_size": 101}, "vocab_size: 100 / 101"),
        ({"eos_token_ids": [2]}, r"eos_token_ids: [2, 3] / [2]"),
    ],
)
def test_a_difference_names_the_field_and_both_sides(change: dict[str, object], difference: str) -> None:
    theirs = model_pb2.ModelFingerprint(
        **{field.name: getattr(FINGERPRINT, field.name) for field in FINGERPRINT.DESCRIPTOR.fields} | change
    )
    assert fingerprint_differences(FINGERPRINT, theirs) == [difference]


def test_names_and_sizes_of_two_models_may_differ() -> None:
    theirs = model_pb2.ModelFingerprint()
    theirs.CopyFrom(FINGERPRINT)
    theirs.model, theirs.feature_width, theirs.context_limit = "b", 0, 64
    assert fingerprint_differences(FINGERPRINT, theirs) == []
