"""A converted SentencePiece tokenizer in the orchestrator: the BOS of prompts, streamed text, the bytes of a token."""

from __future__ import annotations

import random

import pytest

from eagle_pangu.speculation.sentencepiece_bpe import AddedPiece, convert
from orchestrator.detokenizer import Detokenizer, text_of
from orchestrator.tokenizer import Message, Tokenizer
from tests.openpangu import BOS, CHAT_TEMPLATE, CONTROLS, EOS, MARKS, ROLES, library, sentencepiece_model
from tests.orchestrator.scripted import TOKENIZER_JSON
from tests.orchestrator.test_text import TEXTS


def tokenizer(dummy_prefix: bool = True, *, adds_bos: bool = True) -> Tokenizer:
    pieces = library(dummy_prefix=dummy_prefix)
    contents = [*CONTROLS, *MARKS]
    added = sorted(AddedPiece(pieces.piece_to_id(each), each, each in (*CONTROLS, EOS)) for each in contents)
    converted = convert(sentencepiece_model(dummy_prefix=dummy_prefix), added)
    return Tokenizer(converted, CHAT_TEMPLATE, ROLES, adds_bos=adds_bos)


BOTH = {True: tokenizer(True), False: tokenizer(False)}
both_kinds = pytest.mark.parametrize("dummy_prefix", [True, False], ids=["prefix", "no prefix"])


def streamed(read: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(read)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


@both_kinds
@pytest.mark.parametrize("text", [*TEXTS, " ".join(TEXTS) * 4, "今天 天气[unused16]\n很好[unused17] 😀"])
def test_streamed_text_is_the_whole_text(dummy_prefix: bool, text: str) -> None:
    read = BOTH[dummy_prefix]
    ids = read.encode(text)
    assert streamed(read, ids) == read.decode(ids) == text_of(read, ids)
    if "[unused" not in text:
        assert read.decode(ids) == text


@both_kinds
def test_any_ids_at_all_stream_into_the_text_of_the_whole(dummy_prefix: bool) -> None:
    read, chance = BOTH[dummy_prefix], random.Random(3)
    for _ in range(200):
        ids = [chance.randrange(read.size) for _ in range(60)]
        assert streamed(read, ids) == text_of(read, ids)


@both_kinds
def test_a_cut_anywhere_drops_only_the_character_cut_through(dummy_prefix: bool) -> None:
    read, text = BOTH[dummy_prefix], "x 今天😀 é e\u0301 文"
    ids = read.encode(text)
    for length in range(len(ids) + 1):
        assert text.startswith(streamed(read, ids[:length]))


def test_the_bytes_of_tokens_make_the_text() -> None:
    read = BOTH[False]
    for text in TEXTS:
        assert b"".join(map(read.token_bytes.of, read.encode(text))) == text.encode()


def test_a_prompt_begins_with_one_bos_and_raw_text_with_none() -> None:
    read, bos = BOTH[True], library().bos_id()
    for text in ("hello", "今天"):
        assert read.encode_prompt(text) == [bos, *read.encode(text)]
        assert read.encode_prompt(BOS + text) == read.encode(BOS + text)
        assert bos not in read.encode(text)
    assert read.encode_prompt("") == []
    without = tokenizer(adds_bos=False)
    assert without.encode_prompt("hello") == without.encode("hello")


def test_a_rendered_conversation_has_the_ids_of_the_official_recipe() -> None:
    """The template's text, with an empty system turn in front, tokenised as any text is: after the BOS."""
    read, pieces = BOTH[True], library()
    rendered = read.render_chat([Message("user", "北京"), Message("assistant", "好"), Message("user", "hi /no_think")])
    assert rendered == (
        "[unused9]系统：[unused10][unused9]用户：北京[unused10][unused9]助手：好[unused10]"
        "[unused9]用户：hi /no_think[unused10][unused9]助手："
    )
    begin, end = pieces.piece_to_id("[unused9]"), pieces.piece_to_id(EOS)
    turns = ["系统：", "用户：北京", "助手：好", "用户：hi /no_think"]
    expected = [pieces.bos_id()]
    for turn in turns:
        expected += [begin, *pieces.encode(turn), end]
    assert read.encode_prompt(rendered) == [*expected, begin, *pieces.encode("助手：")]


def test_a_system_turn_of_the_callers_takes_the_place_of_the_empty_one() -> None:
    rendered = BOTH[True].render_chat([Message("system", "brief"), Message("user", "hi")])
    assert rendered == "[unused9]系统：brief[unused10][unused9]用户：hi[unused10][unused9]助手："


@pytest.mark.parametrize("roles", [{}, {"bos_token": "<nothing>"}])
def test_a_bos_that_the_vocabulary_does_not_hold_is_a_value_error(roles: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="bos_token"):
        Tokenizer(TOKENIZER_JSON, "", roles, adds_bos=True)
