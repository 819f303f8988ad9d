"""The self-test before serving: every row of a tree, alone and beside another session's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_pangu.speculation.engine import Engine, ForwardResult
from eagle_pangu.speculation.invariance import NoInvarianceError
from eagle_pangu.speculation.plan import ForwardPlan
from eagle_pangu.speculation.segment import Segment
from eagle_pangu.speculation.warm_up import warm_up
from tests.speculation.engines import engine


@pytest.fixture
def target(tmp_path: Path) -> Engine:
    return engine(tmp_path, numerics="bitwise")


@pytest.mark.parametrize("row", range(7))
def test_any_row_of_a_tree_that_drifts_is_noticed(target: Engine, row: int) -> None:
    honest = target._kernel

    def drifting(query: torch.Tensor, key: Any, value: Any, plan: ForwardPlan, scale: float) -> torch.Tensor:
        attended = honest(query, key, value, plan, scale).clone()
        if not plan.is_chain:
            attended[:, row] += 1e-3
        return attended

    target._kernel = drifting
    with pytest.raises(NoInvarianceError, match=f"self-test: row {row} of a tree differs"):
        warm_up(target)


def test_a_tree_that_changes_beside_another_session_is_noticed(target: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = target.run

    def drifting(segments: Sequence[Segment]) -> list[ForwardResult]:
        results = honest(segments)
        if len(segments) > 1:
            results = [each._replace(logits=each.logits + 1e-6) for each in results if each.logits is not None]
        return results

    monkeypatch.setattr(target, "run", drifting)
    with pytest.raises(NoInvarianceError, match="self-test: row 0"):
        warm_up(target)
