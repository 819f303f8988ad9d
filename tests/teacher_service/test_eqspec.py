"""EQSPEC against every session alone: the same logits and greedy tokens in any company, round after round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.devices import sdpa
from eagle_pangu.speculation.layouts.rectangle import Rectangle, SynchronisationError
from eagle_pangu.speculation.segment import Segment
from teacher_service.batching.eqspec import EqSpec, oldest
from tests.speculation.engines import bushy_tree, engine
from tests.teacher_service.greedy_sessions import GreedySession, decode_together


@pytest.mark.parametrize("mode", ["performance", "reference"])
@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chains"])
def test_sessions_that_come_and_go_emit_what_they_would_alone(tmp_path: Path, mode: str, chain: bool) -> None:
    target = engine(tmp_path, mode=mode, numerics="free")
    lengths = (5, 5, 70, 33, 1, 12)
    sessions = [GreedySession(target, seed, length, 8 + seed) for seed, length in enumerate(lengths)]
    passes = decode_together(target, EqSpec(3), sessions, chain=chain)
    for session in sessions:
        assert session.done or session is sessions[-1]
        session.check()
    assert len({len(each.lengths) for each in passes}) > 1
    assert any(len(set(each.lengths)) == 3 for each in passes)


def test_full_acceptance_yields_the_bonus_token(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="free")
    sessions = [GreedySession(target, seed, 8 + seed, 19) for seed in range(3)]
    eqspec = EqSpec(3)
    for _ in range(3):
        segments = [session.propose(depth=5, chain=True) for session in sessions]
        for session, result in zip(sessions, eqspec.compute(target, segments).results, strict=True):
            session.take(result)
    assert [len(session.emitted) for session in sessions] == [1 + 3 * 6] * 3
    for session in sessions:
        session.check()


def test_padded_rows_count_as_computed(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="free")
    sessions = [GreedySession(target, seed, 8, 4) for seed in range(3)]
    trees = [bushy_tree(rows) for rows in (2, 9, 4)]
    computed = EqSpec(3).compute(target, [Segment(s.slot, tree) for s, tree in zip(sessions, trees, strict=True)])
    assert computed.computed_rows == 27
    assert [result.rows for result in computed.results] == [2, 9, 4]


def test_time_without_moves_is_no_realignment(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="free")
    sessions, eqspec = [GreedySession(target, seed, 8 + seed, 4) for seed in range(2)], EqSpec(2)
    segments = [Segment(session.slot, bushy_tree(4)) for session in sessions]
    assert eqspec.compute(target, segments).realign_us > 0
    assert eqspec.compute(target, segments).realign_us == 0


def test_bitwise_numerics_are_refused(tmp_path: Path) -> None:
    target = engine(tmp_path, numerics="bitwise")
    slot = target.open_slot()
    target.prefill(slot, np.arange(3), want_logits=False)
    assert not EqSpec.keeps_bits
    with pytest.raises(ValueError, match=r"numerics: expected free, .* got bitwise"):
        EqSpec(2).compute(target, [Segment(slot, bushy_tree(2))])


def test_reference_mode_attends_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = engine(tmp_path, mode="reference", numerics="free")
    sessions = [GreedySession(target, seed, 8 + seed, 4) for seed in range(2)]
    monkeypatch.setattr(sdpa, "F", None)  # the fused attention would look it up
    for session, result in zip(
        sessions, EqSpec(2).compute(target, [s.propose() for s in sessions]).results, strict=True
    ):
        session.take(result)


def test_reference_mode_notices_kv_that_was_not_realigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = engine(tmp_path, mode="reference", numerics="free")
    sessions, eqspec = [GreedySession(target, seed, 8 + seed, 12) for seed in range(2)], EqSpec(2)
    monkeypatch.setattr(Rectangle, "_realign", lambda *args: 0)
    segments = [session.propose() for session in sessions]
    for session, result in zip(sessions, eqspec.compute(target, segments).results, strict=True):
        session.take(result)
    with pytest.raises(SynchronisationError, match="session row 0"):
        eqspec.compute(target, [session.propose() for session in sessions])


def waiting(*rows: int) -> list[Waiting[Segment]]:
    return [Waiting(index, Segment(None, bushy_tree(count)), index) for index, count in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "budget", "sessions"),
    [
        ((1, 1, 1, 1), 64, 3),  # the group size
        ((4, 4, 4), 8, 2),
        ((2, 3, 9), 9, 2),  # 3 x 9 with the padding
        ((9, 1), 17, 1),
        ((9, 1), 18, 2),
        ((9,), 4, 1),  # one at least
        ((1,), 4, 1),
    ],
)
def test_the_oldest_that_fit_make_the_pass(rows: tuple[int, ...], budget: int, sessions: int) -> None:
    queue = waiting(*rows)
    assert oldest(queue, 3, budget) == queue[:sessions]
    assert EqSpec(3).choose(queue, budget) == queue[:sessions]
