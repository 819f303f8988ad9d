"""Streaming: deltas are whole characters and make the whole text, however tokens fall into rounds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from protos.v1 import generation_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.speaker import pieces_of, speaking_model, speaking_tokenizer
from tests.conformance.systems import System, draft_settings, system, teacher_settings, tiny_engine

pytestmark = MODULE_LOOP

MARK = "\N{REPLACEMENT CHARACTER}"
TEXT = "Ok 😀👩‍👧 日本語、العر e\u0301 हिन् \0ñ."
PIECES = pieces_of(TEXT)


class Stream:
    """A stream, read to its end."""

    def __init__(self, deltas: list[generation_pb2.GenerateStreamResponse]) -> None:
        self.deltas = deltas
        self.text = "".join(delta.text for delta in deltas)
        self.ids = [token for delta in deltas for token in delta.token_ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speaker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """Says TEXT to START, and is its own draft."""
    model = speaking_model(tmp_path_factory.mktemp("speaker") / "teacher", TEXT)
    draft = draft_settings(model, drafter="standalone")
    async with system(tiny_engine(model), draft, teacher_settings(model)) as each:
        yield each


START = [speaking_tokenizer(TEXT)[0].token_to_id("<pad>")]


def whole_characters(tokens: int) -> str:
    """The text of so many tokens, without the character that is cut through at the end."""
    return b"".join(PIECES[:tokens]).decode(errors="ignore")


async def test_the_tokens_of_the_text_cut_through_characters_of_every_length() -> None:
    cut, done = set(), b""
    for piece in PIECES:
        done += piece
        rest = len(done) - len(done.decode(errors="ignore").encode())
        following = TEXT.encode()[len(done) - rest :].decode()[:1]
        if rest:
            cut.add((len(following.encode()), rest))
    assert {(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3)} <= cut


@pytest.mark.parametrize("depth", range(1, 9))
async def test_deltas_make_the_text_however_tokens_fall_into_rounds(speaker: System, depth: int) -> None:
    plain = await speaker.ask(START, drafter="none")
    assert plain.text == TEXT
    whole, stream = await speaker.ask(START, budget=(8, depth)), Stream(await speaker.stream(START, budget=(8, depth)))
    assert whole.speculation.accepted > 0
    assert stream.text == whole.text == TEXT
    assert stream.ids == list(whole.token_ids) == list(plain.token_ids)
    assert not any(MARK in delta.text for delta in stream.deltas)
    finals = [delta for delta in stream.deltas if delta.finish_reason]
    assert finals == [stream.deltas[-1]]
    assert stream.deltas[-1].usage.completion_tokens == len(stream.ids)


async def test_a_cut_at_any_token_ends_with_a_whole_character(speaker: System) -> None:
    for tokens in range(1, len(PIECES) + 1):
        asked = {"max_tokens": tokens, "drafter": "none" if tokens % 8 == 0 else "standalone", "budget": (6, 4)}
        stream = Stream(await speaker.stream(START, **asked))
        assert stream.text == whole_characters(tokens)
        assert len(stream.ids) == stream.deltas[-1].usage.completion_tokens == tokens
        if tokens % 3 == 0:
            assert (await speaker.ask(START, **asked)).text == stream.text


@pytest.mark.parametrize("stop", ["👧", "語、", "\u0301", "لع", "\0"])
async def test_a_stop_string_of_split_characters_is_found_in_any_rounds(speaker: System, stop: str) -> None:
    for depth in (1, 5):
        whole = await speaker.ask(START, stop=[stop], budget=(8, depth))
        stream = Stream(await speaker.stream(START, stop=[stop], budget=(8, depth)))
        assert stream.text == whole.text == TEXT[: TEXT.index(stop)]
        assert whole.matched_stop == stream.deltas[-1].matched_stop == stop


async def test_bytes_that_are_no_text_at_all_are_the_same_in_any_rounds(self_draft: System) -> None:
    """A random model writes broken characters; what stands for them must not depend on the rounds either."""
    for first in range(3):
        plain = await self_draft.ask([first], drafter="none", max_tokens=32)
        for depth in (2, 5):
            stream = Stream(await self_draft.stream([first], max_tokens=32, budget=(8, depth)))
            assert (stream.text, stream.ids) == (plain.text, list(plain.token_ids))


async def test_a_message_a_token_where_that_is_asked_for(speaker: System) -> None:
    by_round = Stream(await speaker.stream(START, budget=(8, 8), return_margins=True, logprobs=1))
    by_token = Stream(await speaker.stream(START, budget=(8, 8), return_margins=True, logprobs=1, stream_tokens=True))
    assert (by_token.text, by_token.ids) == (by_round.text, by_round.ids)
    assert [len(delta.token_ids) for delta in by_token.deltas] == [1] * len(by_token.ids)
    assert all(len(delta.margins) == len(delta.logprobs) == 1 for delta in by_token.deltas)
    assert len(by_round.deltas) < len(by_token.deltas)
    text = ""
    for tokens, delta in enumerate(by_token.deltas, start=1):
        text += delta.text
        assert text == whole_characters(tokens)
    assert [bool(delta.finish_reason) for delta in by_token.deltas[-2:]] == [False, True]


async def test_the_bytes_of_the_tokens_are_those_of_the_text(speaker: System) -> None:
    answer = await speaker.ask(START, logprobs=2)
    assert b"".join(entry.token for entry in answer.logprobs[: len(PIECES)]) == TEXT.encode()
    for entry in answer.logprobs:
        assert len(entry.top_tokens) == len(entry.top_token_ids) == 2
        assert entry.token == entry.top_tokens[0]
