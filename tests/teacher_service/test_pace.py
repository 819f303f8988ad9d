"""What the advice is told of a session's rounds, and what the session's peer is told of the advice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from eagle_pangu.speculation.tree import TokenTree
from teacher_service.advice import Advice
from teacher_service.pace import Pace

ASKED = 8
TREE = TokenTree.build([1, 2, 3], [0, 0, 1])


class Told(Advice):
    """Advice of `given` rows to everybody, that keeps what it is told and asked."""

    def __init__(self) -> None:
        super().__init__(())
        self.given: int | None = None
        self.budgets: list[int | None] = []
        self.asked: list[tuple[int, int]] = []

    def observe_verdict(self, tree, accepted, budget=None) -> None:
        self.budgets.append(budget)

    def rows(self, sessions: int, asked: int) -> int | None:
        self.asked.append((sessions, asked))
        return self.given


def pace(advice: Advice, *, advises: bool = True) -> Pace:
    return Pace(advice, SimpleNamespace(sessions=4), ASKED, advises=advises)


async def test_the_budget_of_a_round_is_what_was_advised_for_it_and_else_what_was_asked_for():
    advice = Told()
    own = pace(advice)
    for advice.given in (3, 0, None):
        own.decided(TREE, [1])
        assert own.next_rows() == advice.given
    own.decided(TREE, [1])
    assert advice.budgets == []  # the answers go first
    await asyncio.sleep(0)
    assert advice.budgets == [ASKED, 3, 0, ASKED]


async def test_a_session_whose_peer_is_not_told_has_the_budget_that_it_asked_for():
    advice = Told()
    advice.given = 3
    own = pace(advice, advises=False)
    assert own.next_rows() is None
    own.decided(TREE, [1])
    await asyncio.sleep(0)
    assert advice.budgets == [ASKED]
    assert advice.asked == []


@pytest.mark.parametrize(("joins", "sessions"), [(False, 4), (True, 5)])
def test_a_session_that_joins_is_not_yet_among_those_counted(joins, sessions):
    advice = Told()
    pace(advice).next_rows(joins=joins)
    assert advice.asked == [(sessions, ASKED)]
