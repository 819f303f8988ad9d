"""Every field of a request is honoured: a proof for each that its value changes the answer as it should."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protos.v1 import generation_pb2, sampling_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.systems import LETTERS, PROMPT, System
from tests.models import EOS, byte_tokenizer

pytestmark = MODULE_LOOP

Proof = Callable[[System], Awaitable[None]]
HONOURED: dict[str, Proof] = {}
WRITING: dict[str, Any] = {"allowed_token_ids": LETTERS, "max_tokens": 12}
TEXT = "Hello, "


def honoured(*fields: str) -> Callable[[Proof], Proof]:
    """The proof of these fields."""

    def register(proof: Proof) -> Proof:
        HONOURED.update(dict.fromkeys(fields, proof))
        return proof

    return register


def words(*ids: int) -> list[sampling_pb2.TokenSequence]:
    return [sampling_pb2.TokenSequence(token_ids=ids)]


@honoured("request_id")
async def its_own_id(each: System) -> None:
    assert (await each.ask(max_tokens=1, request_id="mine")).request_id == "mine"


@honoured("prompt", "prompt_token_ids", "chat")
async def one_prompt_in_three_forms(each: System) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="Hi")])
    answers = [
        await each.ask(text, max_tokens=8),
        await each.ask(byte_tokenizer().encode(text).ids, max_tokens=8),
        await each.send(generation_pb2.GenerationOptions(chat=chat, max_tokens=8)),
    ]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert (await each.ask(text[1:], max_tokens=8)).token_ids != answers[0].token_ids


@honoured("max_tokens")
async def as_many_tokens(each: System) -> None:
    for tokens in (1, 5):
        assert len((await each.ask(max_tokens=tokens, ignore_eos=True)).token_ids) == tokens
    info = await each.client.model_info()
    assert len((await each.ask(ignore_eos=True, drafter="none")).token_ids) == info.default_max_tokens


@honoured("stop", "include_stop")
async def cut_before_or_behind_the_stop(each: System) -> None:
    text = (await each.ask(**WRITING)).text
    place = text.index(text[4:6])
    assert (await each.ask(stop=[text[4:6]], **WRITING)).text == text[:place]
    assert (await each.ask(stop=[text[4:6]], include_stop=True, **WRITING)).text == text[: place + 2]


@honoured("ignore_eos", "min_tokens")
async def the_end_is_passed_or_held_back(each: System) -> None:
    ending: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "max_tokens": 8}
    assert list((await each.ask(**ending)).token_ids) == [EOS]
    assert list((await each.ask(ignore_eos=True, **ending)).token_ids) == [EOS] * 8
    held = (await each.ask(min_tokens=5, **ending)).token_ids
    assert len(held) == 6
    assert list(held).index(EOS) == 5


@honoured("temperature", "seed")
async def draws_differ_by_seed_and_heat(each: System) -> None:
    greedy = await each.ask(max_tokens=8)
    drawn = [await each.ask(max_tokens=8, temperature=heat, seed=seed) for heat, seed in ((1, 1), (1, 2), (2, 1))]
    assert [answer.seed for answer in drawn] == [1, 2, 1]
    assert len({tuple(answer.token_ids) for answer in [greedy, *drawn]}) == 4


@honoured("top_k", "top_p", "min_p")
async def the_best_alone_is_left(each: System) -> None:
    greedy = await each.ask(max_tokens=8)
    for field, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
        answer = await each.ask(max_tokens=8, temperature=50, seed=1, **{field: value})
        assert answer.token_ids == greedy.token_ids, field


@honoured("repetition_penalty", "frequency_penalty", "presence_penalty")
async def what_was_said_is_not_said_again(each: System) -> None:
    few: dict[str, Any] = {"allowed_token_ids": LETTERS[:8], "max_tokens": 8}
    plain = (await each.ask(**few)).token_ids
    assert len(set(plain)) < 8
    for field, value in (("repetition_penalty", 100.0), ("frequency_penalty", 2.0), ("presence_penalty", 2.0)):
        answer = await each.ask(**few, **{field: value})
        assert len(set(answer.token_ids)) > len(set(plain)), field


@honoured("logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids")
async def ids_are_wanted_allowed_or_banned(each: System) -> None:
    assert set((await each.ask(max_tokens=6, logit_bias={LETTERS[3]: 100.0})).token_ids) == {LETTERS[3]}
    plain = (await each.ask(**WRITING)).token_ids
    assert set(plain) <= set(LETTERS)
    banned = (await each.ask(bad_words=words(plain[2]), **WRITING)).token_ids
    assert plain[2] not in banned
    pair = (await each.ask(bad_words=words(plain[1], plain[2]), **WRITING)).token_ids
    assert list(pair[:2]) == list(plain[:2])
    assert (plain[1], plain[2]) not in itertools.pairwise(pair)
    stopped = (await each.ask(stop_token_ids=[plain[5]], **WRITING)).token_ids
    assert list(stopped) == list(plain[: list(plain).index(plain[5]) + 1])


@honoured("drafter", "budget")
async def who_drafts_and_how_much(each: System) -> None:
    for drafter in ("none", "ngram", "standalone"):
        assert (await each.ask(max_tokens=8, drafter=drafter)).speculation.drafter == drafter
    for rows in (1, 4):
        stats = (await each.ask(max_tokens=8, drafter="standalone", budget=(rows, 2))).speculation
        assert 0 < stats.drafted <= rows * stats.rounds


@honoured("return_margins", "logprobs")
async def figures_only_when_asked_for(each: System) -> None:
    plain = await each.ask(max_tokens=6)
    assert (len(plain.margins), len(plain.logprobs)) == (0, 0)
    asked = await each.ask(max_tokens=6, return_margins=True, logprobs=2)
    assert len(asked.margins) == len(asked.logprobs) == len(asked.token_ids)
    for margin, entry in zip(asked.margins, asked.logprobs, strict=True):
        assert entry.top_logprobs[0] - entry.top_logprobs[1] == pytest.approx(margin, abs=1e-3)
    assert all(len(entry.top_token_ids) == 0 for entry in (await each.ask(max_tokens=6, logprobs=0)).logprobs)


@honoured("n")
async def several_answers_to_one_prompt(each: System) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8}
    last = 2**64 - 1
    answer = await each.ask(n=3, seed=last, **asked)
    expected = [await each.ask(seed=(last + i) % 2**64, drafter="none", **asked) for i in range(3)]
    assert [list(one.token_ids) for one in (answer, *answer.further_answers)] == [
        list(one.token_ids) for one in expected
    ]
    assert [one.seed for one in (answer, *answer.further_answers)] == [last, 0, 1]
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
    ids: dict[int, list[int]] = {}
    ends: list[int] = []
    for delta in await each.stream(n=3, seed=last, **asked):
        assert delta.index not in ends
        ids.setdefault(delta.index, []).extend(delta.token_ids)
        ends += [delta.index] if delta.finish_reason else []
    assert (sorted(ends), [ids[i] for i in range(3)]) == ([0, 1, 2], [list(one.token_ids) for one in expected])


@honoured("echo")
async def the_text_begins_with_the_prompt(each: System) -> None:
    plain = await each.ask(TEXT, **WRITING)
    stop = plain.text[5]
    echoed = await each.ask(TEXT, echo=True, n=2, **WRITING)
    for one in (echoed, *echoed.further_answers):
        assert one.text == TEXT + plain.text
        assert one.token_ids == plain.token_ids
    assert list(echoed.prompt_token_ids) == byte_tokenizer().encode(TEXT).ids
    assert not plain.prompt_token_ids
    cut = await each.ask(TEXT, echo=True, stop=["l", stop], **WRITING)
    assert cut.text == TEXT + plain.text[: min(plain.text.find(mark) for mark in ("l", stop) if mark in plain.text)]
    deltas = await each.stream(TEXT, echo=True, **WRITING)
    assert "".join(delta.text for delta in deltas) == echoed.text
    assert [bool(delta.prompt_token_ids) for delta in deltas] == [True] + [False] * (len(deltas) - 1)


@honoured("prompt_logprobs")
async def the_prompt_as_the_teacher_reads_it(each: System) -> None:
    """As if each token of the prompt were decided after the ones before it; twice, for what a cache may keep."""
    for _ in range(2):
        answer = await each.ask(max_tokens=2, prompt_logprobs=3)
        assert len(answer.prompt_logprobs) == len(PROMPT) - 1
        for place, entry in enumerate(answer.prompt_logprobs, start=1):
            bias = {"allowed_token_ids": [PROMPT[place]], "max_tokens": 1, "logprobs": 3, "ignore_eos": True}
            decided = (await each.ask(PROMPT[:place], **bias)).logprobs[0]
            assert entry.logprob == pytest.approx(decided.logprob, abs=1e-3)
            assert entry.top_token_ids == decided.top_token_ids
            assert list(entry.top_logprobs) == pytest.approx(list(decided.top_logprobs), abs=1e-3)
    first, *later = await each.stream(max_tokens=4, prompt_logprobs=3)
    assert len(first.prompt_logprobs) == len(PROMPT) - 1
    assert not any(delta.prompt_logprobs for delta in later)
    assert not (await each.ask(max_tokens=2)).prompt_logprobs


@honoured("priority")
async def any_priority_gives_the_same_answer(each: System) -> None:
    """That higher ones come first is the teacher's to show (tests/teacher_service); here it must not change a token."""
    plain = await each.ask(max_tokens=8)
    for priority in (-100, 100):
        assert (await each.ask(max_tokens=8, priority=priority)).token_ids == plain.token_ids


@honoured("stream_tokens")
async def a_message_a_token(each: System) -> None:
    deltas = await each.stream(max_tokens=8, stream_tokens=True, ignore_eos=True)
    assert [len(delta.token_ids) for delta in deltas] == [1] * 8


@pytest.mark.parametrize("proof", dict.fromkeys(HONOURED.values()), ids=lambda proof: proof.__name__)
async def test_each_field_is_honoured(self_draft: System, proof: Proof) -> None:
    await proof(self_draft)


async def test_every_field_of_the_contract_has_a_proof() -> None:
    assert set(HONOURED) == set(generation_pb2.GenerationOptions.DESCRIPTOR.fields_by_name)
