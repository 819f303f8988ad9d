"""What a session starts from, by sessions on the fake engine alone: no gRPC, no threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_service.prefix_cache import PrefixCache
from teacher_service.round import Round
from teacher_service.session import Session
from tests.teacher_service.fakes import (
    FakeEngine,
    answer,
    chunks_of,
    drive,
    feature_row,
    half_right,
    next_token,
    root_only,
)
from tests.teacher_service.openings import LIMITS, opening

LONG = [7, 1, 4, 4, 9, 2, 6, 6]


class Talk:
    """A session that is prefilled, and what it has committed by the words of the protocol."""

    def __init__(self, cache: PrefixCache, prompt: list[int], chunk: int = 3, **wishes) -> None:
        self.engine = FakeEngine()
        self.session = Session(self.engine, opening(prompt=np.array(prompt), **wishes), LIMITS, chunk, cache)
        chunks = list(chunks_of(self.engine, self.session))
        self.committed, self.features = list(prompt), [chunk.features for chunk in chunks]
        self.next, self.round, self.accepted = chunks[-1].first_token.token_id, 0, []
        assert self.next == next_token(prompt)

    def go_on(self, tree_of=half_right, keep: int | None = None) -> None:
        """One round; of the round before, `keep` accepted rows are committed (all of them by default)."""
        if self.round:
            kept = self.accepted[:keep]
            self.committed += [self.root, *kept]
            self.next = next_token(self.committed)
        commit = len(kept) if self.round else 0
        self.round, self.root = self.round + 1, self.next
        tree = tree_of([*self.committed, self.root])
        message = Round(4, self.round, len(self.committed), commit, tree)
        assert self.session.check(message) is None
        self.session.commit(message)
        verdict = drive(self.engine, self.session.verify(message))
        self.accepted = [int(tree.token_ids[row]) for row in verdict.accepted_rows]
        assert verdict.next_token_id == next_token([*self.committed, self.root, *self.accepted])

    @property
    def cached(self) -> int:
        return self.session.cached_tokens

    def feature_values(self) -> list[list[float]]:
        bits = np.concatenate([part.bits for part in self.features])
        return (bits.astype(np.uint32) << 16).view(np.float32).tolist()


def figures(cache: PrefixCache) -> tuple[int, int]:
    """Tokens and entries kept."""
    return cache.stats().tokens, cache.stats().entries


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        ([*LONG, 3, 3], 8),
        (LONG, 7),  # the last token is read, for its logits
        (LONG[:5], 4),
        ([*LONG[:5], 0, 0], 5),
        ([0, *LONG], 0),
        ([7], 0),
    ],
)
def test_a_session_starts_from_as_much_as_another_one_begins_alike_with(ended, prompt, cached):
    cache = PrefixCache(100)
    first = Talk(cache, LONG)
    if ended:
        first.session.close()
    later = Talk(cache, prompt)
    assert later.cached == cached
    assert later.engine.calls[0].startswith(f"prefill {cached}+")
    assert later.session.committed_length == len(prompt)
    stats = cache.stats()
    assert (stats.sessions, stats.hits, stats.hit_tokens) == (2, int(cached > 0), cached)


@pytest.mark.parametrize("ended", [False, True])
def test_committed_tokens_of_an_answer_serve_as_a_prompt_does_and_pending_ones_do_not(ended):
    cache = PrefixCache(100)
    first = Talk(cache, LONG)
    first.go_on()
    first.go_on(keep=1)
    assert len(first.committed) == len(LONG) + 2
    history = [*LONG, *answer(LONG, 9)]
    assert first.committed == history[: len(LONG) + 2]
    if ended:
        first.session.close()
    later = Talk(cache, history)
    assert later.cached == len(LONG) + 2
    later.go_on()


def test_what_is_kept_lives_on_without_the_slot_it_came_from():
    cache = PrefixCache(100)
    first = Talk(cache, LONG)
    first.session.close()
    first.engine.slots[0].history[:] = [0] * 8
    assert Talk(cache, [*LONG, 1]).cached == 8


def test_the_longest_match_is_taken_wherever_it_is():
    cache = PrefixCache(100)
    for end in ([], [5], [6, 6]):
        Talk(cache, [*LONG, *end]).session.close()
    running = Talk(cache, [*LONG, 5, 5, 5])
    assert running.cached == 9
    assert Talk(cache, [*LONG, 5, 5, 5, 1]).cached == 11
    assert Talk(cache, [*LONG, 6, 6, 1]).cached == 10


def test_an_entry_that_a_longer_one_begins_with_is_dropped_whichever_comes_first():
    cache = PrefixCache(100)
    Talk(cache, LONG[:4]).session.close()
    Talk(cache, LONG).session.close()
    assert figures(cache) == (8, 1)
    Talk(cache, LONG[:6]).session.close()
    assert figures(cache) == (8, 1)
    Talk(cache, [*LONG[:5], 0]).session.close()
    assert figures(cache) == (14, 2)


def test_past_the_limit_the_least_recently_used_entry_goes():
    cache = PrefixCache(12)
    for head in (1, 2, 3):
        Talk(cache, [head] * 4).session.close()
    assert figures(cache) == (12, 3)
    assert Talk(cache, [1, 1, 9]).cached == 2  # used, and later than the second one
    Talk(cache, [4] * 4).session.close()
    assert figures(cache) == (12, 3)
    assert [Talk(cache, [head, head, 9]).cached for head in (1, 2, 3, 4)] == [2, 0, 2, 2]
    Talk(cache, [5] * 11).session.close()
    assert figures(cache) == (11, 1)


def test_an_ended_session_that_an_entry_covers_counts_as_its_use():
    cache = PrefixCache(8)
    for prompt, wishes in (([1] * 4, {}), ([2] * 4, {}), ([1] * 3, {"prompt_logprobs": 0}), ([3] * 4, {})):
        Talk(cache, prompt, **wishes).session.close()  # the third one looks nothing up
    assert [Talk(cache, [head, head, 9]).cached for head in (1, 2, 3)] == [2, 0, 2]


def test_a_session_longer_than_the_limit_is_not_copied_and_drives_nobody_out():
    cache = PrefixCache(7)
    Talk(cache, LONG[:5]).session.close()
    long = Talk(cache, LONG)
    long.engine.slots[0].keep = lambda: pytest.fail("copied what would be evicted at once")
    long.session.close()
    assert figures(cache) == (5, 1)


def test_with_the_cache_off_nothing_is_reused_copied_or_recorded():
    cache = PrefixCache(0)
    running = Talk(cache, LONG, want_features=True)
    running.go_on()
    running.go_on()
    assert running.session._features == []
    assert Talk(cache, LONG, want_features=True).cached == 0
    running.engine.slots[0].keep = lambda: pytest.fail("copied for a cache that is off")
    running.session.close()
    assert Talk(cache, LONG).cached == 0
    assert cache.stats() == (0, 0, 0, 3, 0, 0)


@pytest.mark.parametrize("place", ["prefill 3+", "commit", "verify"])
@pytest.mark.parametrize("ended", [False, True])
def test_nobody_starts_from_a_session_whose_pass_failed(place, ended):
    cache, engine = PrefixCache(100), FakeEngine()

    def fail(call: str) -> None:
        if call.startswith(place):
            raise RuntimeError(place)

    engine.before = fail
    session = Session(engine, opening(prompt=np.array(LONG)), LIMITS, 3, cache)
    reading = chunks_of(engine, session)
    next(reading)
    with pytest.raises(RuntimeError, match=place):
        _to_the_end(session, reading)
    if ended:
        session.close()
        assert figures(cache) == (0, 0)
    assert Talk(cache, LONG).cached == 0


def _to_the_end(session: Session, reading) -> None:
    """Prefill and two rounds."""
    list(reading)
    for number, history in enumerate(([*LONG, next_token(LONG)], [*LONG, *answer(LONG, 2)]), 1):
        message = Round(4, number, len(history) - 1, 0, root_only(history))
        assert session.check(message) is None
        session.commit(message)
        drive(session._engine, session.verify(message))


def test_a_session_that_ends_half_way_through_its_prompt_serves_as_far_as_it_came():
    cache = PrefixCache(100)
    engine = FakeEngine()
    session = Session(engine, opening(prompt=np.array(LONG)), LIMITS, 3, cache)
    reading = chunks_of(engine, session)
    next(reading)
    assert Talk(cache, LONG).cached == 3
    session.close()
    assert Talk(cache, LONG).cached == 7  # of the one before this one
    idle = Session(FakeEngine(), opening(prompt=np.array([9, 9])), LIMITS, 3, cache)
    idle.close()
    assert figures(cache) == (3, 1)


@pytest.mark.parametrize("place", ["prefill", "verify"])
def test_a_session_given_up_while_it_waits_for_a_pass_serves_as_far_as_it_came(place):
    cache = PrefixCache(100)
    if place == "prefill":
        engine = FakeEngine()
        session = Session(engine, opening(prompt=np.array(LONG)), LIMITS, 3, cache)
        next(chunks_of(engine, session))
        steps = session.prefill(lambda chunk: None)
    else:
        session = Talk(cache, LONG).session
        steps = session.verify(Round(4, 1, len(LONG), 0, root_only([*LONG, next_token(LONG)])))
    next(steps)
    steps.close()
    session.close()
    assert Talk(cache, [*LONG, 1]).cached == (3 if place == "prefill" else len(LONG))


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_features_of_reused_tokens_are_sent_as_if_they_had_been_read(ended, chunk):
    cache = PrefixCache(100)
    first = Talk(cache, LONG, want_features=True)
    for _ in range(3):
        first.go_on(keep=1)  # of two accepted rows
    history = [*LONG, *answer(LONG, 4)]
    assert first.committed == history
    if ended:
        first.session.close()
    later = Talk(cache, [*history, 1, 2], chunk=chunk, want_features=True)
    assert later.cached == len(history)
    starts = [part.start for part in later.features]
    assert starts == [0, *range(len(history) + chunk, len(history) + 2, chunk)]
    assert later.feature_values() == [feature_row([*history, 1, 2][: n + 1]) for n in range(len(history) + 2)]


def test_a_session_that_wants_features_starts_only_from_one_that_recorded_them():
    cache = PrefixCache(100)
    with_features, without = Talk(cache, LONG[:4], want_features=True), Talk(cache, LONG)
    for _ in range(2):  # both run, then both have ended
        assert Talk(cache, [*LONG, 1], want_features=True).feature_values()[0] == feature_row(LONG[:1])
        assert Talk(cache, [*LONG[:6], 1]).cached == 6
        without.session.close()
        with_features.session.close()
    assert figures(cache) == (12, 2)  # the longer one without features does not stand in for the shorter one with them
    cache = PrefixCache(100)
    Talk(cache, LONG).session.close()
    assert Talk(cache, LONG, want_features=True).cached == 0


def test_an_entry_with_features_stands_in_for_the_same_one_without():
    cache = PrefixCache(100)
    Talk(cache, LONG).session.close()
    Talk(cache, LONG, want_features=True).session.close()
    assert figures(cache) == (8, 1)
    Talk(cache, LONG).session.close()
    assert figures(cache) == (8, 1)
    assert Talk(cache, LONG, want_features=True).cached == 7


def test_a_session_that_asks_for_prompt_log_probabilities_reads_its_whole_prompt_and_serves_others():
    cache = PrefixCache(100)
    first = Talk(cache, LONG)
    asking = Talk(cache, [*LONG, 1], prompt_logprobs=0)
    assert asking.cached == 0
    first.session.close()
    asking.session.close()
    assert Talk(cache, [*LONG, 1, 2]).cached == 9
    assert cache.stats().sessions == 3


@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=6),  # prompt
            st.booleans(),  # wants features
            st.integers(0, 3),  # rounds
            st.sampled_from([None, 0, 1]),  # accepted rows that are committed
            st.integers(0, 9),  # which session is closed afterwards, if there is such a one
        ),
        max_size=12,
    ),
    limit=st.sampled_from([1, 9, 10**6]),
)
def test_any_order_of_sessions_gives_every_one_the_longest_prefix_that_there_is_and_the_teachers_own_tokens(
    steps, limit
):
    cache = PrefixCache(limit)
    running: list[tuple[Talk, bool]] = []
    ended: list[tuple[list[int], bool]] = []
    for prompt, want_features, rounds, keep, closed in steps:
        there = [(talk.committed, features) for talk, features in running] + ended
        usable = [tokens for tokens, features in there if features or not want_features]
        best = max((_common(tokens, prompt[:-1]) for tokens in usable), default=0)
        talk = Talk(cache, prompt, want_features=want_features)  # which checks every token
        assert talk.cached == best if limit == 10**6 else talk.cached <= best
        if want_features:
            assert talk.feature_values() == [feature_row(prompt[: n + 1]) for n in range(len(prompt))]
        for _ in range(rounds):
            talk.go_on(keep=keep)
        running.append((talk, want_features))
        if closed < len(running):
            gone, features = running.pop(closed)
            gone.session.close()
            ended.append((gone.committed, features))
        assert cache.stats().tokens <= limit


def _common(one: list[int], other: list[int]) -> int:
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    return common
