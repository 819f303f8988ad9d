"""Stops: an answer ends at the token that ends it, however many tokens were accepted in one round around it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import pytest_asyncio

from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import generation_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.systems import LETTERS, PROMPT, System
from tests.models import EOS
from tests.orchestrator.scripted import Asked

pytestmark = MODULE_LOOP

TOKENS = 16
BUDGET = (8, 8)
WRITING: dict[str, Any] = {"allowed_token_ids": LETTERS, "budget": BUDGET, "logprobs": 1, "return_margins": True}
WRITING |= {"temperature": 2.0, "seed": 7}  # a greedy text repeats itself, and every stop would be found near its start
STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text(scripted_draft: System) -> str:
    """The teacher-only answer without any stop, one character a token; known to the draft."""
    plain = await scripted_draft.ask(drafter="none", max_tokens=TOKENS + 16, **WRITING)
    assert len(plain.text) == len(plain.token_ids) == TOKENS + 16
    scripted_draft.knows(PROMPT, plain.token_ids, 0)
    return plain.text


def expected(text: str, stops: tuple[str, ...], max_tokens: int) -> tuple[str, int, str]:
    """Text, tokens and matched stop, by a plain search: the stop completed first, of two at once the longer."""
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text[:max_tokens]}
    if not ends:
        return text[:max_tokens], max_tokens, ""
    first = min(ends.values())
    matched = max((stop for stop in ends if ends[stop] == first), key=len)
    return text[: first - len(matched)], first, matched


async def assert_ends(each: System, text: str, stops: tuple[str, ...], max_tokens: int = TOKENS) -> None:
    """Unary and streamed, and every part of the answer ends at the same token."""
    asked: dict[str, Any] = {"stop": stops, "max_tokens": max_tokens, **WRITING}
    whole, deltas = await each.ask(**asked), await each.stream(**asked)
    cut, kept, matched = expected(text, stops, max_tokens)
    for last in (whole, deltas[-1]):
        assert (last.matched_stop, last.finish_reason) == (matched, STOP if matched else LENGTH)
        assert last.usage.completion_tokens == kept
    for parts in ([whole], deltas):
        ids = [token for part in parts for token in part.token_ids]
        assert ids == [LETTERS["abcdefghijklmnopqrstuvwxyz".index(letter)] for letter in text[:kept]]
        assert "".join(part.text for part in parts) == cut
        assert sum(len(part.logprobs) for part in parts) == sum(len(part.margins) for part in parts) == kept


@pytest.mark.parametrize("right", [(0,), (1,), (5,), (8,), (2, 0, 5)])
async def test_a_stop_string_may_complete_at_any_token_of_any_accepted_run(
    scripted_draft: System, text: str, right: tuple[int, ...]
) -> None:
    """Inside rounds and across them."""
    scripted_draft.scripted.plan = scripted_draft.scripted.teacher.chain(*right)
    for place in range(0, TOKENS, 2):
        await assert_ends(scripted_draft, text, (text[place : place + 1 + place % 5],))


@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize("place", [1, 2, 8, 9, 10, 11, 17, 18])
async def test_a_stop_string_that_completes_at_the_edge_of_a_run_ends_the_answer_there(
    scripted_draft: System, text: str, place: int, length: int
) -> None:
    """In the first round and in the second one: at the first and the second accepted token, at the last one, at the
    token after it.
    """
    scripted_draft.scripted.plan = scripted_draft.scripted.teacher.chain(8)
    stop = text[max(0, place + 1 - length) : place + 1]
    assert text.index(stop) + len(stop) == place + 1, "the text must have it there for the first time"
    whole = await scripted_draft.stream(max_tokens=28, **WRITING)
    assert [len(delta.token_ids) for delta in whole] == [1, 9, 9, 9]
    await assert_ends(scripted_draft, text, (stop,), max_tokens=28)


async def test_of_several_stop_strings_in_one_run_the_one_completed_first_wins_in_any_order(
    scripted_draft: System, text: str
) -> None:
    scripted_draft.scripted.plan = scripted_draft.scripted.teacher.chain(8)
    several = (text[4:6], text[2:8], text[5:7])
    for stops in itertools.permutations(several):
        await assert_ends(scripted_draft, text, stops)
    # Two that one token completes: a letter that was not there before, and the letters up to it.
    new = next(place for place in range(2, TOKENS) if text[place] not in text[:place])
    for stops in itertools.permutations((text[new - 2 : new + 1], text[new], "nowhere")):
        await assert_ends(scripted_draft, text, stops)


@pytest.mark.parametrize("beyond", [-1, 0, 1, 3])
async def test_stop_comes_before_length_where_one_run_crosses_both(
    scripted_draft: System, text: str, beyond: int
) -> None:
    """And length comes first where the stop would be completed past it."""
    scripted_draft.scripted.plan = scripted_draft.scripted.teacher.chain(8)
    stop = text[4:7]
    await assert_ends(scripted_draft, text, (stop,), max_tokens=text.index(stop) + len(stop) + beyond)


async def test_the_stop_string_stays_in_the_text_where_it_was_asked_for(scripted_draft: System, text: str) -> None:
    scripted_draft.scripted.plan = scripted_draft.scripted.teacher.chain(8)
    stop = text[4:7]
    whole = await scripted_draft.ask(stop=[stop], include_stop=True, max_tokens=TOKENS, **WRITING)
    assert whole.text == text[: text.index(stop)] + stop


@pytest.mark.parametrize("right", [0, 2, 8])
async def test_an_end_of_sequence_inside_an_accepted_run_ends_the_answer_there(
    scripted_draft: System, right: int
) -> None:
    """The draft goes on past it with tokens that the teacher would decide if it were not the end."""
    prompt, ended = await ending_answer(scripted_draft)
    on = await scripted_draft.ask(prompt, drafter="none", ignore_eos=True, max_tokens=len(ended.token_ids) + 10)
    kept = len(ended.token_ids)
    assert on.token_ids[:kept] == ended.token_ids
    scripted_draft.knows(prompt, on.token_ids, right)
    whole = await scripted_draft.ask(prompt, budget=BUDGET, logprobs=0)
    deltas = await scripted_draft.stream(prompt, budget=BUDGET, logprobs=0)
    assert whole.token_ids == ended.token_ids
    assert [token for part in deltas for token in part.token_ids] == list(ended.token_ids)
    assert whole.text == "".join(part.text for part in deltas) == ended.text
    assert (whole.finish_reason, whole.matched_stop) == (STOP, "")
    assert len(whole.logprobs) == whole.usage.completion_tokens == deltas[-1].usage.completion_tokens == kept
    past = await scripted_draft.ask(prompt, budget=BUDGET, ignore_eos=True, max_tokens=kept + 10)
    assert past.token_ids == on.token_ids
    assert scripted_draft.scripted.faults == []


async def ending_answer(each: System) -> tuple[list[int], generation_pb2.GenerateResponse]:
    """A prompt whose answer ends by itself, late enough to lie in an accepted run."""
    for first in range(256):
        answer = await each.ask([first], drafter="none", max_tokens=24)
        if answer.finish_reason == STOP and len(answer.token_ids) > 4:
            assert answer.token_ids[-1] == EOS
            return [first], answer
    raise AssertionError("no answer of this model ends by itself")


@pytest.mark.parametrize("depth", [1, 4])
async def test_an_end_of_sequence_that_the_teacher_rejects_ends_nothing(scripted_draft: System, depth: int) -> None:
    """EOS below the root, or below so many right tokens, with and without rows below it."""
    plain = await scripted_draft.ask(drafter="none", max_tokens=TOKENS)
    assert EOS not in plain.token_ids
    known = scripted_draft.knows(PROMPT, plain.token_ids, 0)

    def plan(asked: Asked) -> TokenTree:
        history, tokens = list(asked.sequence), [asked.sequence[-1]]
        for level in range(min(asked.rows, asked.depth)):
            tokens.append(EOS if level == depth - 1 else known.next_token(history))
            history.append(tokens[-1])
        return TokenTree.build(tokens, [0, *range(len(tokens) - 1)])

    scripted_draft.scripted.plan = plan
    whole = await scripted_draft.ask(max_tokens=TOKENS, budget=BUDGET)
    assert (whole.token_ids, whole.finish_reason) == (plain.token_ids, LENGTH)
    assert whole.speculation.accepted == 0 if depth == 1 else whole.speculation.accepted > 0


@pytest.mark.parametrize("right", [0, 3, 8])
async def test_a_stop_token_ends_the_answer_and_stays_in_its_ids(scripted_draft: System, text: str, right: int) -> None:
    plain = await scripted_draft.ask(drafter="none", max_tokens=TOKENS, **WRITING)
    scripted_draft.knows(PROMPT, plain.token_ids, right)
    for place in range(TOKENS):
        token = plain.token_ids[place]
        kept = list(plain.token_ids).index(token) + 1
        whole = await scripted_draft.ask(stop_token_ids=[token], max_tokens=TOKENS, **WRITING)
        assert (whole.token_ids, whole.text) == (plain.token_ids[:kept], text[: kept - 1])
        assert (whole.finish_reason, whole.matched_stop) == (STOP, "")
