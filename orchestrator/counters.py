"""What one answer counts: rounds, drafted and accepted rows, fallbacks, and where the time went.

Counts only; rates are the reader's, but for the one that the response carries. It knows no messages and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class PartTimes(NamedTuple):
    """Time of one round by part, in microseconds; what is missing from the whole round is the orchestrator's own."""

    draft_us: int = 0
    wire_us: int = 0
    queue_us: int = 0
    teacher_us: int = 0
    commit_us: int = 0

    def plus(self, other: PartTimes) -> PartTimes:
        """The sums, part by part."""
        return PartTimes(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))


class Batch(NamedTuple):
    """The teacher's pass that decided a round.

    sessions: in it. rows: computed for all of them. realign_us: of its time, spent on moving KV of earlier rounds.
    """

    sessions: int = 0
    rows: int = 0
    realign_us: int = 0


@dataclass
class Counters:
    """Sums over the rounds of one answer.

    At every moment 0 <= accepted <= drafted, and emitted tokens = 1 + accepted + rounds - cut, where the 1 is the token
    that prefill decides and cut is 1 when a stop took the last round's next token, else 0.

    drafter: that served; "none" until a draft session opened. fallback_reasons: each once, in order of appearance.
    cached_prompt_tokens: of which the teacher had the KV when the answer began. load_limited_rounds: whose tree was
    asked to be smaller than the budget, since the teacher was shared.
    """

    drafter: str = "none"
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    fallback_rounds: int = 0
    fallback_reasons: list[str] = field(default_factory=list)
    times: PartTimes = field(default_factory=PartTimes)
    rounds_us: int = 0
    prefill_us: int = 0
    cached_prompt_tokens: int = 0
    load_limited_rounds: int = 0

    def count_round(
        self, *, drafted: int, accepted: int, fallback: str | None, load_limited: bool, times: PartTimes
    ) -> None:
        """One more round.

        Args:
            drafted: rows sent to the teacher, the root left out.
            accepted: of these, accepted and emitted.
            fallback: why there was no draft although one was asked for; None otherwise.
            load_limited: the draft was asked for fewer rows than the request was, or for none.
            times: of this round.
        """
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.load_limited_rounds += load_limited
        self.times = self.times.plus(times)
        if fallback is not None:
            self.fallback_rounds += 1
            if fallback not in self.fallback_reasons:
                self.fallback_reasons.append(fallback)

    def tokens_per_round(self, emitted: int) -> float:
        """Answer tokens after the first per round; 0 without rounds."""
        return (emitted - 1) / self.rounds if self.rounds else 0.0
