"""A SentencePiece BPE model as tokenizers JSON, with the same ids.

transformers' converter does the work; what it is not known to convert exactly is refused, and what it made is compared
with the sentencepiece library before anybody uses it. Which pieces a model treats as added tokens is the caller's
knowledge.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer
from transformers.convert_slow_tokenizer import SpmConverter

_BPE = 2  # sentencepiece's ModelType
_CONTROL, _USER_DEFINED = 3, 4  # its piece types
_SPACE = "▁"
_COMPARED_TEXTS = 2000
_MOST_PIECES = 12  # of a compared text

_SAMPLES = (
    "The quick brown fox, 3.14 times: (a+b)*c != 0;\n\tdef f(x):\n        return x\r\n",
    "今天天气很好，我们去公园散步。昇腾上运行的盘古大模型：１２３",
    "  two  spaces   and three, ▁ itself, a real \N{REPLACEMENT CHARACTER} ",
    "emoji 😀 a family 👩‍👩‍👧‍👦, e\u0301 combined, نص, हिन्दी, \0 \x07 \ufeff \u3000",
    "<0x41> spelled out, [unused9 and <s",
)


class SentencePieceError(ValueError):
    """A SentencePiece model that cannot be converted exactly; says what is in the way."""


class AddedPiece(NamedTuple):
    """A piece that is cut out of a text before SentencePiece sees it. special: it has no text of its own."""

    id: int
    content: str
    special: bool


def convert(model: bytes, added: Sequence[AddedPiece]) -> bytes:
    """tokenizers JSON, UTF-8, of a SentencePiece model.

    Args:
        model: a tokenizer.model file.
        added: in id order; the text between them is tokenised piece by piece, as transformers' slow tokenizers do.

    Raises:
        SentencePieceError: it is no such file, of another kind than BPE over bytes without normalisation, an added
            piece is not at its id, or the result differs from the library's on some text.
    """
    proto = _parse(model)
    _require_known_kind(proto)
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    for piece in added:
        if ids.get(piece.content) != piece.id:
            raise SentencePieceError(
                f"added token {piece.content!r}: expected it as piece {piece.id}, it is {ids.get(piece.content)}"
            )
        if proto.pieces[piece.id].type == _USER_DEFINED:
            # It never reaches the model; without user-defined pieces the converter keeps to merges alone.
            proto.pieces[piece.id].type = _CONTROL
    # Typed Any as transformers is not followed by the type checker.
    tokenizer: Any = SpmConverter.build_tokenizer_from_spm_proto(proto, ids, legacy=True)
    tokenizer.add_tokens([AddedToken(piece.content, normalized=False, special=piece.special) for piece in added])
    _compare(tokenizer, SentencePieceProcessor(model_proto=model), added)
    return str(tokenizer.to_str()).encode()


def _parse(model: bytes) -> Any:
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf makes it at import
    try:
        proto.ParseFromString(model)
    except DecodeError as error:
        raise SentencePieceError(f"expected a SentencePiece model: {error}") from error
    if not proto.pieces:
        raise SentencePieceError("expected a SentencePiece model, found one without pieces")
    return proto


def _require_known_kind(proto: Any) -> None:
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    expected = {
        "a model of type BPE": trainer.model_type == _BPE,
        "byte fallback": trainer.byte_fallback,
        "text as it is, without a normalisation table": not normalizer.precompiled_charsmap,
        "extra spaces kept": not normalizer.remove_extra_whitespaces,
        "spaces escaped": normalizer.escape_whitespaces,
        "spaces before words, not after": not trainer.treat_whitespace_as_suffix,
        "pieces that are all different": len({piece.piece for piece in proto.pieces}) == len(proto.pieces),
    }
    for what, holds in expected.items():
        if not holds:
            raise SentencePieceError(f"expected {what}; another kind is not converted")


def _compare(tokenizer: Tokenizer, library: SentencePieceProcessor, added: Sequence[AddedPiece]) -> None:
    by_content = {piece.content: piece.id for piece in added}
    longest_first = sorted(by_content, key=len, reverse=True)
    # A group in the pattern makes `split` give back what it split at.
    cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if added else r"(?!)")
    for text in _compared_texts(library, list(by_content)):
        expected: list[int] = []
        for part in filter(None, cut.split(text)):
            expected += [by_content[part]] if part in by_content else library.encode(part)
        if tokenizer.encode(text, add_special_tokens=False).ids != expected:
            raise SentencePieceError(f"the converted tokenizer differs from sentencepiece's on the text {text!r}")


def _compared_texts(library: SentencePieceProcessor, contents: Sequence[str]) -> Iterator[str]:
    """Samples, then random runs of the model's own pieces: a run of whole pieces meets every kind of merge."""
    yield from _SAMPLES
    yield "".join(f"{content} x{content}" for content in contents)
    chance = random.Random(0)
    for _ in range(_COMPARED_TEXTS):
        run = [chance.randrange(library.get_piece_size()) for _ in range(chance.randint(1, _MOST_PIECES))]
        yield "".join(map(library.id_to_piece, run)).replace(_SPACE, " ")
