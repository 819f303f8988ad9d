"""Where an answer ends, with the rules alone and through the whole loop."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from orchestrator.detokenizer import Detokenizer
from orchestrator.stops import End, StopRules, StopStrings
from orchestrator.tokenizer import Tokenizer
from protos.v1 import generation_pb2, tree_pb2
from tests.orchestrator.conftest import stack
from tests.orchestrator.scripted import EOS, TOKENIZER_JSON, ScriptedTeacher, ids_of, knowing, saying

TOKENIZER = Tokenizer(TOKENIZER_JSON)
PROMPT = ids_of("prompt")


class Answer:
    """What the rules make of runs of tokens."""

    def __init__(self, runs: Sequence[Sequence[int]], *, stop: Sequence[str] = (), max_tokens: int = 1000) -> None:
        rules = StopRules(Detokenizer(TOKENIZER), end_token_ids=[EOS], max_tokens=max_tokens, stop=stop)
        self.text, self.kept, self.end = "", 0, None
        self.pieces: list[str] = []
        for run in runs:
            cut = rules.take(run)
            self.pieces.append("".join(cut.pieces))
            self.text += self.pieces[-1]
            self.kept += cut.kept
            self.end = cut.end
            if cut.end is not None:
                break
            assert cut.kept == len(run)


def test_an_end_of_sequence_inside_a_run_ends_there_and_has_no_text() -> None:
    answer = Answer([ids_of("ab"), [*ids_of("c"), EOS, *ids_of("d")]])
    assert (answer.text, answer.kept, answer.end) == ("abc", 4, End("stop"))


def test_without_end_of_sequence_ids_decoding_goes_past_them() -> None:
    rules = StopRules(Detokenizer(TOKENIZER), end_token_ids=[], max_tokens=3, stop=[])
    assert rules.take([*ids_of("a"), EOS, *ids_of("b"), *ids_of("c")]) == (["a", "", "b"], End("length"))


@pytest.mark.parametrize(("stop", "kept"), [("b", 2), ("a", 1), ("c", 3), ("bc", 3)])
def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it(stop: str, kept: int) -> None:
    answer = Answer([ids_of("abcde")], stop=[stop])
    assert (answer.kept, answer.end) == (kept, End("stop", stop))
    assert answer.text == "abcde".split(stop)[0]


def test_a_stop_string_may_span_rounds_and_its_beginning_is_withheld() -> None:
    answer = Answer([ids_of("one ST"), ids_of("O"), ids_of("P two")], stop=["STOP"])
    assert answer.pieces == ["one ", "", ""]
    assert (answer.kept, answer.end) == (8, End("stop", "STOP"))


def test_text_withheld_in_vain_comes_once_it_is_no_stop_string() -> None:
    answer = Answer([ids_of("one ST"), ids_of("AR"), ids_of("S")], stop=["STOP"])
    assert answer.pieces == ["one ", "STAR", ""]


def test_text_withheld_comes_at_the_end_of_an_answer_that_ends_otherwise() -> None:
    assert Answer([ids_of("one ST"), [EOS]], stop=["STOP"]).text == "one ST"
    assert Answer([ids_of("one ST")], stop=["STOP"], max_tokens=6).text == "one ST"


@pytest.mark.parametrize("stop", list(itertools.permutations(["cd", "bcde", "ef"])))
def test_the_stop_string_completed_first_wins_whatever_their_order(stop: tuple[str, ...]) -> None:
    answer = Answer([ids_of("abcdefgh")], stop=stop)
    assert (answer.text, answer.kept, answer.end) == ("ab", 4, End("stop", "cd"))


@pytest.mark.parametrize("stop", [["d", "bcd"], ["bcd", "d"]])
def test_of_two_completed_by_one_character_the_longer_wins(stop: list[str]) -> None:
    answer = Answer([ids_of("abcdefgh")], stop=stop)
    assert (answer.text, answer.end) == ("a", End("stop", "bcd"))


def test_stop_comes_before_length_where_one_token_reaches_both() -> None:
    assert Answer([ids_of("abc")], stop=["c"], max_tokens=3).end == End("stop", "c")
    assert Answer([[*ids_of("ab"), EOS]], max_tokens=3).end == End("stop")
    assert Answer([ids_of("abc")], stop=["d"], max_tokens=3).end == End("length")


def test_length_comes_before_a_stop_string_past_it() -> None:
    answer = Answer([ids_of("abcd")], stop=["d"], max_tokens=3)
    assert (answer.text, answer.kept, answer.end) == ("abc", 3, End("length"))


def test_a_stop_string_that_ends_in_a_split_character_is_found() -> None:
    answer = Answer([[token] for token in ids_of("a😀b😀c")], stop=["b😀"])
    assert (answer.text, answer.kept) == ("a😀", 1 + 4 + 1 + 4)


def test_a_character_cut_through_at_the_end_is_dropped() -> None:
    answer = Answer([ids_of("a😀")], max_tokens=4)
    assert (answer.text, answer.kept, answer.end) == ("a", 4, End("length"))


def test_stop_strings_are_found_as_a_plain_search_finds_them() -> None:
    chance = random.Random(3)
    for _ in range(400):
        text = "".join(chance.choices("ab", k=30))
        stop = ["".join(chance.choices("ab", k=chance.randint(1, 6))) for _ in range(chance.randint(1, 3))]
        search, got, matched = StopStrings(stop), "", None
        position = 0
        while position < len(text) and matched is None:
            step = chance.randint(1, 5)
            final, matched = search.push(text[position : position + step])
            got += final
            position += step
        if matched is None:
            got += search.finish()
        ends = {string: text.find(string) + len(string) for string in stop if string in text}
        if not ends:
            assert (got, matched) == (text, None)
            continue
        first = min(ends.values())
        longest = max((string for string in ends if ends[string] == first), key=len)
        assert (got, matched) == (text[: first - len(longest)], longest)


@pytest.mark.parametrize(
    ("stop", "right", "depth"),
    [
        ("ell", 5, 6),  # completes on the 2nd of 5 accepted tokens
        ("e", 8, 8),  # at the first of 8
        ("ello w", 2, 2),  # across rounds
        ("world", 0, 4),  # on a next token
    ],
)
async def test_text_ids_margins_and_usage_end_at_the_same_token(stop: str, right: int, depth: int) -> None:
    text = "hello world, and more"
    teacher = ScriptedTeacher(saying(len(PROMPT), [*ids_of(text), EOS]))
    async with stack(teacher, knowing(teacher.next_token, lambda number: right)) as each:
        response = await each.generate(
            stop=["nothing of it", stop],
            max_tokens=50,
            return_margins=True,
            budget=tree_pb2.TreeBudget(rows=8, depth=depth),
        )
    assert response.text == text.split(stop)[0]
    kept = text.find(stop) + len(stop)
    assert list(response.token_ids) == ids_of(text)[:kept]
    assert len(response.margins) == response.usage.completion_tokens == kept
    assert response.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert response.matched_stop == stop
    stats = response.speculation
    assert 1 + stats.accepted + stats.rounds - kept in (0, 1)


async def test_the_end_of_sequence_id_inside_an_accepted_run_is_the_last_token() -> None:
    answer = [*ids_of("abcd"), EOS]
    teacher = ScriptedTeacher(saying(len(PROMPT), answer))
    async with stack(teacher, knowing(teacher.next_token, lambda number: 8)) as each:
        response = await each.generate(max_tokens=50)
        parts = await each.stream(max_tokens=50)
        longer = await each.generate(max_tokens=8, ignore_eos=True)
    assert list(response.token_ids) == [token for part in parts for token in part.token_ids] == answer
    assert response.text == "".join(part.text for part in parts) == "abcd"
    assert response.matched_stop == ""
    assert (response.speculation.rounds, response.speculation.accepted) == (1, 4)
    assert len(longer.token_ids) == 8
    assert longer.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_a_first_token_that_ends_the_answer_needs_no_round() -> None:
    teacher = ScriptedTeacher(saying(len(PROMPT), [EOS]))
    async with stack(teacher) as each:
        response = await each.generate(max_tokens=50)
    assert (list(response.token_ids), response.text) == ([EOS], "")
    assert response.speculation.rounds == 0
    assert response.speculation.tokens_per_round == 0
