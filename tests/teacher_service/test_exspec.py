"""EXSPEC against every session alone; and what a group of equal length saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_pangu.serving.batch_worker import Waiting
from eagle_pangu.speculation.layouts.rectangle import Rectangle
from teacher_service.batching.exspec import ExSpec
from teacher_service.batching.pool import PASSED_OVER
from tests.speculation.engines import engine
from tests.teacher_service.greedy_sessions import GreedySession, decode_together


@pytest.mark.parametrize("mode", ["performance", "reference"])
@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chains"])
def test_sessions_that_come_and_go_emit_what_they_would_alone(tmp_path: Path, mode: str, chain: bool) -> None:
    target = engine(tmp_path, mode=mode, numerics="free")
    lengths = (5, 6, 6, 33, 5, 90)
    sessions = [GreedySession(target, seed, length, 8 + seed) for seed, length in enumerate(lengths)]
    passes = decode_together(target, ExSpec(8, 2), sessions, chain=chain)
    for session in sessions:
        assert session.done or session is sessions[-1]
        session.check()
    pairs = [set(each.lengths) for each in passes if len(each.lengths) == 2]
    assert {len(pair) for pair in pairs} == {1, 2}  # groups, and the fallback


def test_a_group_that_stays_together_moves_nothing_but_what_it_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine(tmp_path, numerics="free")
    sessions = [GreedySession(target, seed, length, 20) for seed, length in enumerate((9, 20, 9))]
    exspec, moved, align = ExSpec(3, 2), [], Rectangle.align
    monkeypatch.setattr(Rectangle, "align", lambda *args: moved.append(align(*args)) or moved[-1])
    odd = Waiting(sessions[1], sessions[1].propose(), 0.0)
    equal = [sessions[0], sessions[2]]
    for number in range(PASSED_OVER + 1):
        queue = [odd, *(Waiting(session, session.propose(depth=2), float(number)) for session in equal)]
        chosen = exspec.choose(queue, 64)
        exspec.choose(queue, 64)  # a choice that is not computed passes nobody over
        if number == PASSED_OVER:
            assert chosen == queue[:2]  # the oldest was passed over often enough
            break
        assert chosen == queue[1:]
        computed = exspec.compute(target, [each.request for each in chosen])
        for session, result in zip(equal, computed.results, strict=True):
            session.take(result)
    assert moved == [9 + 9, *[3 + 3] * (PASSED_OVER - 1)]
