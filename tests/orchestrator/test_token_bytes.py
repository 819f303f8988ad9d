"""The bytes of each token's own text, in vocabularies of every kind, and where answers hold them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from orchestrator.detokenizer import Detokenizer, text_of
from orchestrator.tokenizer import Tokenizer
from protos.v1 import sampling_pb2
from tests.orchestrator.conftest import Stack
from tests.orchestrator.scripted import EOS, TOKENIZER_JSON, ids_of, logprobs_of, saying
from tests.orchestrator.test_text import KINDS

BYTE_LEVEL = {name: Tokenizer(KINDS[name].to_str().encode()) for name in ("bytes", "merges")}
PIECES = Tokenizer(KINDS["sentencepiece"].to_str().encode())


def tokenizer_of(vocabulary: list[str], decoder: decoders.Decoder | None, *added: AddedToken) -> Tokenizer:
    fast = FastTokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    if decoder is not None:
        fast.decoder = decoder
    fast.add_tokens(list(added))
    return Tokenizer(fast.to_str().encode())


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@given(text=st.text())
def test_the_bytes_of_byte_level_tokens_make_the_bytes_of_their_text(kind: str, text: str) -> None:
    tokenizer = BYTE_LEVEL[kind]
    assert b"".join(map(tokenizer.token_bytes.of, tokenizer.encode(text))) == text.encode()


@given(text=st.text(alphabet="abc xyz é😀\n日"))
def test_the_bytes_of_pieces_make_their_text_with_the_space_before_it(text: str) -> None:
    ids = PIECES.encode(text)
    assert b"".join(map(PIECES.token_bytes.of, ids)) == (f" {text}" if text else "").encode()


def test_each_byte_of_a_split_character_is_that_byte() -> None:
    for tokenizer in (BYTE_LEVEL["bytes"], PIECES):
        *_, last = [tokenizer.token_bytes.of(token_id) for token_id in tokenizer.encode("a😀")]
        assert last == "😀".encode()[-1:]


def test_special_and_added_tokens_have_their_text_and_unknown_ids_none() -> None:
    assert BYTE_LEVEL["bytes"].token_bytes.of(EOS) == b"<|im_end|>"
    assert BYTE_LEVEL["bytes"].token_bytes.of(10_000) == b""
    accented = tokenizer_of(sorted(pre_tokenizers.ByteLevel.alphabet()), decoders.ByteLevel(), AddedToken("éé"))
    assert accented.token_bytes.of(256) == "éé".encode()  # and not the bytes that é stands for


def test_what_looks_like_a_byte_is_one_only_where_the_decoder_takes_it_for_one() -> None:
    vocabulary = ["<0x41>", "▁é"]
    fallback = decoders.Sequence([decoders.Replace("▁", " "), decoders.Sequence([decoders.ByteFallback()])])
    assert tokenizer_of(vocabulary, fallback).token_bytes.of(0) == b"A"
    assert tokenizer_of(vocabulary, decoders.ByteLevel()).token_bytes.of(0) == b"<0x41>"
    assert tokenizer_of(vocabulary, decoders.Metaspace()).token_bytes.of(0) == b"<0x41>"
    for decoder in (fallback, decoders.Metaspace()):
        assert tokenizer_of(vocabulary, decoder).token_bytes.of(1) == " é".encode()
    assert tokenizer_of(vocabulary, None).token_bytes.of(1) == "▁é".encode()


def test_a_letter_that_also_stands_for_a_byte_is_not_taken_for_half_a_character() -> None:
    tokenizer = tokenizer_of(["Ã", "a"], decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]))
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(1), detokenizer.push(0), detokenizer.finish()] == ["a", "Ã", ""]
    assert text_of(tokenizer, [1, 0]) == "aÃ"


async def test_answers_hold_the_bytes_of_their_tokens_and_of_the_best_ones(usual: Stack) -> None:
    said = [*ids_of("é😀 x"), EOS]
    usual.teacher.next_token = saying(len(ids_of("prompt")), said)
    token_bytes = Tokenizer(TOKENIZER_JSON).token_bytes

    def expected(history: list[int], token: int, top: int) -> sampling_pb2.TokenLogprobs:
        entry = logprobs_of(history, token, top)
        entry.token = token_bytes.of(token)
        entry.top_tokens.extend(token_bytes.of(each) for each in entry.top_token_ids)
        return entry

    history = [*ids_of("prompt"), *said]
    places = [expected(history[:at], history[at], 3) for at in range(len(history))]
    for n in (1, 2):
        fields = {"max_tokens": 50, "logprobs": 3, "prompt_logprobs": 3, "n": n}
        whole = await usual.generate(**fields)
        usual.draft.asked.clear()
        parts = await usual.stream(**fields)
        assert list(whole.prompt_logprobs) == list(parts[0].prompt_logprobs) == places[1:6]
        every = [whole.logprobs, *(answer.logprobs for answer in whole.further_answers)]
        every += [[entry for part in parts if part.index == index for entry in part.logprobs] for index in range(n)]
        assert [list(logprobs) for logprobs in every] == [places[6:]] * (2 * n)
    assert b"".join(entry.token for entry in whole.logprobs) == "é😀 x<|im_end|>".encode()


async def test_no_bytes_come_where_no_log_probabilities_do(usual: Stack) -> None:
    response = await usual.generate(max_tokens=5)
    assert (list(response.logprobs), list(response.prompt_logprobs)) == ([], [])
    assert [len(entry.top_tokens) for entry in (await usual.generate(max_tokens=5, logprobs=0)).logprobs] == [0] * 5
