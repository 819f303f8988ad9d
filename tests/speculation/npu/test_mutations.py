"""Each mutation of our calls of Ascend's operators is caught, and by what the table says."""

from __future__ import annotations

import pytest

from tests.simulated_npu.mutations import MUTATIONS, Mutation

CASES = [(mutation, operator) for mutation in MUTATIONS for operator in mutation.operators]


@pytest.mark.parametrize(
    ("mutation", "operator"), CASES, ids=[f"{mutation.name}, {operator}" for mutation, operator in CASES]
)
def test_it_is_caught(mutation: Mutation, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caught = mutation.trial(monkeypatch, operator)
    assert caught.by is mutation.caught_by, caught
    assert mutation.says in caught.text
