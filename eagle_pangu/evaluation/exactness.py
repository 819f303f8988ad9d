"""What must hold of answers beside the teacher-only ones of the same turns (DESIGN §7), and what does not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_pangu.evaluation.records import Answer, Divergence, Numerics, TurnRecord, first_divergence

MOST_FALLBACKS = 0.1  # of the rounds


def divergences_of(
    records: Sequence[TurnRecord], others: Sequence[Answer | None], near_tie: float
) -> tuple[Divergence, ...]:
    """Where each of `others` first leaves the teacher-only answer of its record; those that never do are left out."""
    found = (
        first_divergence(record, other, near_tie)
        for record, other in zip(records, others, strict=True)
        if other is not None
    )
    return tuple(divergence for divergence in found if divergence is not None)


def partial_match(record: TurnRecord) -> float:
    """Length of the common prefix with the teacher-only ids over the length of these, 0 .. 1."""
    divergence = first_divergence(record, record.answer, near_tie=0.0)
    return 1.0 if divergence is None else divergence.position / len(record.teacher_only.token_ids)


def not_exact(divergences: Sequence[Divergence], numerics: Numerics) -> list[str]:
    """The divergences that these numerics do not allow, a sentence each."""
    return [
        f"{d.id} turn {d.turn}: token {d.position} is {d.token},"
        f" teacher-only {d.teacher_only_token} (margin {d.margin})"
        for d in divergences
        if numerics.must_be_exact or not d.near_tie
    ]


def without_draft(answers: Sequence[Answer]) -> list[str]:
    """A sentence where the draft was missing too often for the answers to tell anything of it."""
    rounds = sum(answer.rounds for answer in answers)
    fallbacks = sum(answer.fallback_rounds for answer in answers)
    if fallbacks <= MOST_FALLBACKS * rounds:
        return []
    reasons = ", ".join(sorted({reason for answer in answers for reason in answer.fallback_reasons}))
    return [f"{fallbacks} of {rounds} rounds had no draft ({reasons}): neither ids nor speed tell much of it"]
