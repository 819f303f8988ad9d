"""Bytes from anywhere: a message parses or is refused with DecodeError, a tree is legal or refused by field."""

import importlib
from collections.abc import Callable
from itertools import pairwise

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_features, decode_tree
from protos.errors import InvalidFieldError
from protos.generate import PROTO_DIRECTORY
from protos.v1 import tree_pb2
from tests.trees import UINT32_MAX, token_trees, wire_trees

MODULES = [importlib.import_module(f"protos.v1.{path.stem}_pb2") for path in sorted(PROTO_DIRECTORY.glob("*.proto"))]
MESSAGES: list[type[Message]] = [
    getattr(module, name) for module in MODULES for name in module.DESCRIPTOR.message_types_by_name
]
each_message = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.DESCRIPTOR.name)

# Tag and payload of every wire type: random bytes alone seldom get past the first field.
varints = st.integers(0, 2**64 - 1).map(lambda value: _varint(value))
payloads = {
    0: varints,
    1: st.binary(min_size=8, max_size=8),
    2: st.binary(max_size=24).map(lambda data: _varint(len(data)) + data),
    5: st.binary(min_size=4, max_size=4),
}
fields = st.one_of(
    *(
        st.tuples(st.integers(1, 20), payload).map(lambda field, kind=kind: _varint(field[0] << 3 | kind) + field[1])
        for kind, payload in payloads.items()
    )
)
wire_bytes = st.one_of(st.binary(max_size=64), st.lists(fields, max_size=8).map(b"".join))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        encoded.append(low | (0x80 if value else 0))
        if not value:
            return bytes(encoded)


@each_message
@given(data=wire_bytes)
@settings(max_examples=60)
def test_bytes_from_anywhere_parse_or_raise_decode_error(message: type[Message], data: bytes) -> None:
    parsed = message()
    try:
        parsed.ParseFromString(data)
    except DecodeError:
        return
    assert message.FromString(parsed.SerializeToString(deterministic=True)).ByteSize() == parsed.ByteSize()


def refusal_of(check: Callable[[], object]) -> InvalidFieldError | None:
    try:
        check()
    except InvalidFieldError as refusal:
        return refusal
    return None


def assert_legal_or_refused(message: tree_pb2.TokenTree) -> None:
    """Validation either passes, and then every rule holds, or raises InvalidFieldError with a field of the message."""
    tree = TokenTree(*decode_tree(message))
    refusal = refusal_of(lambda: tree.validate(vocab_size=50, max_rows=6, max_depth=4))
    if refusal is not None:
        assert refusal.field.removeprefix("tree.") in tree_pb2.TokenTree.DESCRIPTOR.fields_by_name
        assert refusal.row is None or 0 <= refusal.row < tree.rows
        return
    assert 1 <= tree.rows <= 7
    assert len(tree.parents) == tree.rows
    assert tree.parents[0] == 0
    assert all(0 <= tree.parents[row] < row for row in range(1, tree.rows))
    assert all(0 <= token_id < 50 for token_id in tree.token_ids)
    assert tree.depth.max() <= 4
    siblings = sorted(zip(tree.parents[1:].tolist(), tree.token_ids[1:].tolist(), strict=True))
    assert all(one != other for one, other in pairwise(siblings))


@given(wire_trees())
@example(tree_pb2.TokenTree())
@example(tree_pb2.TokenTree(token_ids=[1], parents=[UINT32_MAX]))
@example(tree_pb2.TokenTree(token_ids=[UINT32_MAX], parents=[0]))
@example(tree_pb2.TokenTree(token_ids=[1, 2], parents=[0, UINT32_MAX]))
@example(tree_pb2.TokenTree(token_ids=[1, 2], parents=[0, 1]))
@example(tree_pb2.TokenTree(token_ids=[1], parents=[0], scores=[float("nan")]))
@example(tree_pb2.TokenTree(token_ids=[1, 2], parents=[0, 0], scores=[0, float("-inf")]))
@example(tree_pb2.TokenTree(token_ids=[], parents=[0, 0, 0]))
@settings(max_examples=500)
def test_any_tree_message_is_legal_or_refused_by_field(message: tree_pb2.TokenTree) -> None:
    assert_legal_or_refused(message)


@given(wire_bytes)
def test_tree_bytes_from_anywhere_are_legal_or_refused(data: bytes) -> None:
    try:
        message = tree_pb2.TokenTree.FromString(data)
    except DecodeError:
        return
    assert_legal_or_refused(message)


@given(token_trees(max_rows=6, vocab_size=50, scored=True), st.data())
@settings(max_examples=300)
def test_a_legal_tree_with_one_byte_changed_is_legal_or_refused(tree: TokenTree, data: st.DataObject) -> None:
    sent = bytearray(
        tree_pb2.TokenTree(token_ids=tree.token_ids, parents=tree.parents, scores=tree.scores).SerializeToString()
    )
    sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = tree_pb2.TokenTree.FromString(bytes(sent))
    except DecodeError:
        return
    assert_legal_or_refused(message)


@given(wire_bytes, st.integers(0, UINT32_MAX))
def test_feature_bytes_from_anywhere_are_decoded_or_refused(data: bytes, width: int) -> None:
    try:
        message = tree_pb2.Features.FromString(data)
    except DecodeError:
        return
    refusal = refusal_of(lambda: decode_features(message, width))
    if refusal is None:
        assert decode_features(message, width).shape == (message.count, width)
    else:
        assert refusal.field == "features.data"
