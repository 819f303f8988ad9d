"""What an endurance run draws, and what it makes of what it saw."""

from __future__ import annotations

from itertools import islice

import pytest

from eagle_pangu.evaluation.arrivals import Load
from eagle_pangu.evaluation.asking import CANCELLED
from eagle_pangu.evaluation.latency import Arrival, StreamedAnswer
from eagle_pangu.evaluation.load import LoadedPhase, LoadRecord
from eagle_pangu.evaluation.load_summary import summarise_load
from eagle_pangu.evaluation.prompts import PromptItem, default_prompts
from eagle_pangu.evaluation.records import Answer, Numerics, TurnRecord
from eagle_pangu.evaluation.soak import Memory, SoakSummary, draws, requests_until, summarise_soak, uneven_prompts
from eagle_pangu.evaluation.teacher_state import Free

LONGEST = 4000
WHOLE = Free(32, 1000)


def test_prompts_are_of_very_different_lengths_and_depend_on_the_seed_alone() -> None:
    items = default_prompts()
    prompts = uneven_prompts(items, LONGEST, seed=1)
    lengths = sorted(len(prompt.turns[0]) for prompt in prompts)
    assert len(prompts) == len({prompt.id for prompt in prompts}) == len(items)
    assert lengths[0] >= 20
    assert lengths[-1] <= LONGEST
    assert lengths[-1] > 30 * lengths[0]
    assert prompts == uneven_prompts(items, LONGEST, seed=1)
    assert prompts != uneven_prompts(items, LONGEST, seed=2)
    assert all(prompt.turns[0].strip() for prompt in prompts)


def test_sessions_differ_in_length_some_leave_and_the_seed_decides_which() -> None:
    drawn = list(islice(draws(5, 128, seed=1), 400))
    assert drawn == list(islice(draws(5, 128, seed=1), 400))
    assert drawn != list(islice(draws(5, 128, seed=2), 400))
    assert {each.prompt for each in drawn} == set(range(5))
    lengths = [each.max_tokens for each in drawn]
    assert min(lengths) == 1
    assert 100 < max(lengths) <= 128
    leaving = [each.cancel_after for each in drawn if each.cancel_after is not None]
    assert 100 < len(leaving) < 300
    assert min(leaving) < 0.2
    assert max(leaving) > 10
    assert min(each.pause for each in drawn) >= 0


def test_no_request_starts_past_the_deadline() -> None:
    prompts = [PromptItem("a", "test", ("one",)), PromptItem("b", "test", ("two",))]
    references = [Answer((number,), "", "stop", 1.0, 1) for number in (1, 2)]
    times = iter(range(100))
    requests = list(requests_until(7, prompts, references, "ngram", draws(2, 9, 0), clock=lambda: next(times)))
    assert len(requests) == 7
    assert len({request.request_id for request in requests}) == 7
    pairs = {(request.item.id, request.reference.token_ids) for request in requests}
    assert pairs == {("a", (1,)), ("b", (2,))}
    assert {(request.max_tokens, request.cancel_after, request.pause) for request in requests} == {
        draw[1:] for draw in islice(draws(2, 9, 0), 7)
    }


def record(answer: tuple[int, ...], finish_reason: str, expected: tuple[int, ...]) -> LoadRecord:
    alone = Answer(expected, "", finish_reason, 1.0, 1, margins=(9.0,) * len(expected))
    other = Answer(answer, "", finish_reason, 1.0, 1, margins=(9.0,) * len(answer))
    arrivals = (Arrival(0.5, len(answer)),) if answer else ()
    return LoadRecord(TurnRecord("a", 1, alone, other), StreamedAnswer(other, arrivals))


STEADY = Memory(100.0, 120.0, 120.0)


def summary_of(*records: LoadRecord, after: Free = WHOLE, memory: Memory = STEADY) -> SoakSummary:
    phase = LoadedPhase(Load(32), records, seconds=1.0)
    load = summarise_load(phase, Numerics("float32", "bitwise", "performance"), "ngram")
    return summarise_soak(load, phase, WHOLE, after, {"teacher": STEADY, "draft": memory})


def test_finished_and_cancelled_sessions_are_counted_and_all_compared() -> None:
    good = [record((1, 2), "length", (1, 2)), record((1,), CANCELLED, (1,)), record((), CANCELLED, ())]
    summary = summary_of(*good)
    assert (summary.finished, summary.cancelled, summary.cancelled_before_first_token) == (1, 2, 1)
    assert (summary.load.exact_match, summary.load.partial_match, summary.failures) == (1, 1, ())
    for bad in (record((1, 3), "length", (1, 2)), record((1, 3), CANCELLED, (1, 2))):
        summary = summary_of(*good, bad)
        assert summary.load.exact_match == pytest.approx(3 / 4)
        assert [failure[:23] for failure in summary.failures] == ["a turn 1: token 1 is 3,"]


@pytest.mark.parametrize(
    ("after", "said"),
    [(Free(31, 1000), "31 free slots, 32 before"), (Free(32, 990), "990 free KV tokens, 1000 before")],
)
def test_what_is_not_given_back_fails_the_run(after: Free, said: str) -> None:
    (failure,) = summary_of(record((1,), "length", (1,)), after=after).failures
    assert said in failure


@pytest.mark.parametrize(
    ("memory", "grows"),
    [
        (Memory(100.0, 300.0, 363.0), False),
        (Memory(100.0, 300.0, 365.0), True),
        (Memory(100.0, 300.0, 100.0), False),
        (Memory(None, None, None), False),
    ],
)
def test_memory_above_that_under_load_fails_the_run(memory: Memory, *, grows: bool) -> None:
    failures = summary_of(record((1,), "length", (1,)), memory=memory).failures
    assert failures == (("the draft holds 365 MiB without sessions, 300 with them halfway",) if grows else ())
