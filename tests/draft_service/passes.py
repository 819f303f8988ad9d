"""Draft sessions' work seen to its end: alone, or several sessions' together as a drafter's thread does it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from draft_service.drafters.base import Budget, Drafter, DraftSession, run_alone
from eagle_pangu.speculation.tree import TokenTree


class Alone:
    """A draft session whose passes are shared with nobody."""

    def __init__(self, drafter: Drafter[Any, Any], session: DraftSession[Any, Any]) -> None:
        self.drafter, self.session = drafter, session

    def advance(self) -> None:
        run_alone(self.drafter, self.session.advance())

    def propose(self, budget: Budget) -> TokenTree:
        return run_alone(self.drafter, self.session.propose(budget))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def run_together(
    drafter: Drafter[Any, Any], works: Sequence[Generator[Any, Any, Any]], late: Sequence[int] = ()
) -> list[Any]:
    """The values of works that take part in the same passes; work i begins with pass ``late[i]``, 0 the first."""
    begins = list(late) or [0] * len(works)
    values: dict[int, Any] = {}
    outcomes: dict[int, Any] = {}
    for number in range(1000):
        requests = {}
        for place, work in enumerate(works):
            if place in values or begins[place] > number:
                continue
            try:
                requests[place] = work.send(outcomes.get(place))
            except StopIteration as finished:
                values[place] = finished.value
        if len(values) == len(works):
            return [values[place] for place in range(len(works))]
        given = drafter.compute(list(requests.values())) if requests else []
        outcomes = dict(zip(requests, given, strict=True))
    raise AssertionError("no end")
