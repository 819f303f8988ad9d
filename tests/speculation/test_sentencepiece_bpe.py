"""Ids are the sentencepiece library's own, cut at added tokens as the slow tokenizer cuts, or the model is refused."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import SpmConverter

from eagle_pangu.speculation import sentencepiece_bpe
from eagle_pangu.speculation.sentencepiece_bpe import AddedPiece, SentencePieceError, convert
from tests.openpangu import BOS, CONTROLS, EOS, MARKS, library, sentencepiece_model

FRAGMENTS = [
    *("a", "aa", "The", " ", "  ", "\n", "\t", "\r\n", ".", "3.14", "▁", "\0", "\x07", "\ufeff", "\u3000"),
    *("今天", "系统：", "，", "１", "😀", "👩‍👩‍👧‍👦", "e\u0301", "é", "نص", "हिन्दी", "\N{REPLACEMENT CHARACTER}"),
    *("<0x41>", "<0x0A>", "[unused", "[unused1", "<s", *CONTROLS, *MARKS),
]

both_kinds = pytest.mark.parametrize("dummy_prefix", [True, False], ids=["prefix", "no prefix"])


def added_pieces(dummy_prefix: bool = True) -> list[AddedPiece]:
    pieces = library(dummy_prefix=dummy_prefix)
    contents = [*CONTROLS, *MARKS]
    return sorted(AddedPiece(pieces.piece_to_id(each), each, each in (*CONTROLS, EOS)) for each in contents)


def expected_ids(text: str, dummy_prefix: bool) -> list[int]:
    """As the tokenizer class beside the weights does it."""
    pieces, added = library(dummy_prefix=dummy_prefix), {each.content: each.id for each in added_pieces(dummy_prefix)}
    pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    ids: list[int] = []
    for part in re.split(f"({pattern})", text):
        ids += [added[part]] if part in added else pieces.encode(part)
    return ids


CONVERTED = {kind: convert(sentencepiece_model(dummy_prefix=kind), added_pieces(kind)) for kind in (True, False)}
TOKENIZERS = {kind: Tokenizer.from_buffer(json) for kind, json in CONVERTED.items()}


def ids_of(text: str, dummy_prefix: bool) -> list[int]:
    ids: list[int] = TOKENIZERS[dummy_prefix].encode(text, add_special_tokens=False).ids
    return ids


@both_kinds
@given(parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=12))
@settings(max_examples=400)
def test_ids_of_any_text_are_the_librarys(dummy_prefix: bool, parts: list[str]) -> None:
    text = "".join(parts)
    assert ids_of(text, dummy_prefix) == expected_ids(text, dummy_prefix)


@both_kinds
def test_ids_of_runs_of_pieces_are_the_librarys(dummy_prefix: bool) -> None:
    pieces, chance = library(dummy_prefix=dummy_prefix), random.Random(7)
    for _ in range(3000):
        run = [pieces.id_to_piece(chance.randrange(pieces.get_piece_size())) for _ in range(chance.randint(1, 9))]
        text = "".join(run).replace("▁", " ")
        assert ids_of(text, dummy_prefix) == expected_ids(text, dummy_prefix), text


@both_kinds
def test_a_text_comes_back_whole(dummy_prefix: bool) -> None:
    for text in ("The capital,  two spaces\n\tand 今天 😀 e\u0301 \0", "def add(first):\n    return 1\n"):
        assert TOKENIZERS[dummy_prefix].decode(ids_of(text, dummy_prefix)) == text


def test_only_tokens_with_a_role_have_no_text() -> None:
    tokenizer, prefixless = TOKENIZERS[True], TOKENIZERS[False]
    thought = f"{BOS}[unused16]so[unused17]yes{EOS}"
    assert prefixless.decode(prefixless.encode(thought).ids) == "[unused16]so[unused17]yes"
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    assert special == {*CONTROLS, EOS}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "unigram"}, "type BPE"),
        ({"byte_fallback": False}, "byte fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalisation"),
        ({"remove_extra_whitespaces": True}, "extra spaces"),
        ({"treat_whitespace_as_suffix": True}, "before words"),
    ],
    ids=lambda value: str(value),
)
def test_a_model_of_another_kind_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SentencePieceError, match=said):
        convert(sentencepiece_model(**changes), [])


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff", b"no model"])
def test_another_file_is_refused(content: bytes) -> None:
    with pytest.raises(SentencePieceError, match="expected a SentencePiece model"):
        convert(content, [])


def test_an_added_token_must_be_the_piece_of_its_id() -> None:
    with pytest.raises(SentencePieceError, match=r"'\[unused3\]': expected it as piece 5"):
        convert(sentencepiece_model(), [AddedPiece(5, "[unused3]", False)])
    with pytest.raises(SentencePieceError, match="'<new>': expected it as piece 440, it is None"):
        convert(sentencepiece_model(), [AddedPiece(440, "<new>", False)])


def without_dummy_prefix(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = TOKENIZERS[False].normalizer


def with_dropped_merges(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 1.0


def without_bytes(tokenizer: Tokenizer) -> None:
    tokenizer.model.byte_fallback = False


@pytest.mark.parametrize("spoil", [without_dummy_prefix, with_dropped_merges, without_bytes])
def test_a_conversion_that_gives_other_ids_is_refused(spoil: object, monkeypatch: pytest.MonkeyPatch) -> None:
    build = SpmConverter.build_tokenizer_from_spm_proto

    def spoilt(*arguments: object, **options: object) -> Tokenizer:
        tokenizer = build(*arguments, **options)
        spoil(tokenizer)  # type: ignore[operator]
        return tokenizer

    monkeypatch.setattr(sentencepiece_bpe.SpmConverter, "build_tokenizer_from_spm_proto", spoilt)
    with pytest.raises(SentencePieceError, match="differs from sentencepiece's on the text"):
        convert(sentencepiece_model(), added_pieces())
