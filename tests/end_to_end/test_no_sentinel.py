"""No negative and no out-of-range index anywhere in a whole generate call, model code of transformers included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draft_service.drafters.base import Budget, Drafter, run_alone
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.standalone import StandaloneDrafter
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.index_guard import IndexGuard
from eagle_pangu.speculation.sampling import greedy
from eagle_pangu.speculation.tree import TokenTree
from tests.speculation.engines import NUMERICS, engine

PROMPT = np.tile(np.arange(20, 31), 6)


def generate(
    teacher: Engine, drafter: Drafter | None, read: list[int], rounds: int, budget: Budget
) -> tuple[list[int], int]:
    """The whole path without the wire: (answer ids, accepted rows)."""
    slot = teacher.open_slot()
    teacher.prefill(slot, PROMPT[:40], want_logits=False)
    first = teacher.prefill(slot, PROMPT[40:], want_logits=True).logits
    answer = greedy(first).token_ids.tolist()
    appended, accepted = list(answer), 0
    draft = drafter.open(read, budget) if drafter else None
    for _ in range(rounds):
        if drafter is None or draft is None:
            tree = TokenTree.root_only(answer[-1])
        else:
            draft.extend(appended)
            tree = run_alone(drafter, draft.propose(budget))
        decided = greedy(teacher.verify(slot, tree).logits).token_ids
        path = tree.accept(decided)
        teacher.commit(slot, path)
        appended = [*tree.token_ids[path].tolist(), int(decided[path[-1] if path else 0])]
        answer += appended
        accepted += len(path)
    return answer, accepted


@pytest.mark.parametrize(("mode", "numerics"), NUMERICS)
@pytest.mark.parametrize("drafter", ["ngram", "standalone"])
def test_a_guard_over_a_whole_generate_call_sees_only_legal_indices(
    tmp_path: Path, mode: str, numerics: str, drafter: str
) -> None:
    teacher = engine(tmp_path, mode=mode, numerics=numerics)
    expected, _ = generate(teacher, None, [], 49, Budget(0, 0))
    prompt = PROMPT.tolist()
    with IndexGuard() as guard, torch.inference_mode():
        if drafter == "ngram":
            # A random model repeats nothing; a draft is never trusted, so it may as well have read the answer before.
            read = [*prompt, *expected, *prompt]
            answer, accepted = generate(teacher, NgramDrafter(1, 4, 8), read, 7, Budget(12, 6))
        else:
            answer, accepted = generate(teacher, StandaloneDrafter(engine(tmp_path), 3), prompt, 7, Budget(12, 6))
    assert sum(guard.checked.values()) > 0
    assert answer == expected[: len(answer)]
    assert accepted > 0
