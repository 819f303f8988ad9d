"""Drafting rehearsed on recorded answers: how many tokens a round would bring, without a teacher.

A greedy answer is the path that the teacher takes, so a proposed tree is accepted as far as the answer runs through it,
and the round decides one token more. Features are the stored ones. What drafts, and where answers come from, is not
known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.base import Budget, Drafter, run_alone
from draft_service.training.answers import Answer
from eagle_pangu.speculation.tree import TokenTree

SPAN = 64
"""Answer tokens of one line of the table by position."""


class Round(NamedTuple):
    """One round. position: answer tokens decided before it; accepted: drafted tokens that the answer goes along."""

    position: int
    accepted: int


def rehearse(drafter: Drafter[Any, Any], answer: Answer, features: NDArray[np.uint16], budget: Budget) -> list[Round]:
    """The rounds that a greedy answer takes.

    Args:
        drafter: one that any session may be opened of.
        answer: decoded greedily; its first token comes from the prompt's prefill, without a draft.
        features: [tokens of prompt and answer, feature_width] bits of bfloat16 values; not read where not needed.
        budget: of every tree.
    """
    prompt, response = answer.prompt_ids.tolist(), answer.response_ids.tolist()
    session = drafter.open(prompt, budget)
    rounds: list[Round] = []
    decided, described = 1, 0
    session.extend(response[:1])
    while decided < len(response):
        if drafter.needs_features:
            end = len(prompt) + decided - 1
            session.read_features(described, features[described:end])
            described = end
        accepted = accepted_length(run_alone(drafter, session.propose(budget)), response[decided:])
        # The last token of an answer is the teacher's own, drafted or not.
        accepted = min(accepted, len(response) - decided - 1)
        rounds.append(Round(decided, accepted))
        session.extend(response[decided : decided + accepted + 1])
        decided += accepted + 1
    session.close()
    return rounds


def accepted_length(tree: TokenTree, continuation: Sequence[int]) -> int:
    """Rows below the root that a continuation runs through."""
    row, length = 0, 0
    for token in continuation:
        child = tree.children[row].get(token)
        if child is None:
            break
        row, length = child, length + 1
    return length


def tokens_per_round(rounds: Sequence[Round]) -> float:
    """Tokens decided by these rounds, a round; 0 without rounds."""
    return 1.0 + sum(one.accepted for one in rounds) / len(rounds) if rounds else 0.0


def figures(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """What a record keeps of the rounds of each drafter, by its name.

    Returns:
        tokens_per_round: by drafter. by_position: by drafter, over the rounds that begin in each `SPAN` tokens of an
        answer.
    """
    by_position: dict[str, list[float]] = {}
    for name, all_rounds in rounds.items():
        spans = range(max((one.position for one in all_rounds), default=-1) // SPAN + 1)
        by_position[name] = [
            tokens_per_round([one for one in all_rounds if one.position // SPAN == span]) for span in spans
        ]
    return {
        "tokens_per_round": {name: tokens_per_round(all_rounds) for name, all_rounds in rounds.items()},
        "by_position": by_position,
    }
