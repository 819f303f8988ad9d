"""Forward passes over the rows of several sessions: what a session asks for and gets, and what is counted of all."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from eagle_pangu.speculation.engine import ForwardResult
from eagle_pangu.speculation.segment import Segment


class Reading(Protocol):
    """A prompt that is being read: a session that waits for its next chunk."""

    def waits_for(self, other: Reading) -> bool:
        """Whether the other one's next chunk is what this one would begin with: then it had better come after it.

        Never true the other way round too, nor of one that came later.
        """
        ...

    def prepare(self) -> int:
        """Get ready for the next chunk; its rows, >= 1."""
        ...

    def chunk(self, rows: int) -> Segment:
        """The first `rows` rows of it; prepared here where `prepare` failed."""
        ...


Request: TypeAlias = Segment | Reading
"""A tree to verify, or a prompt to read on in."""


class PassShare(NamedTuple):
    """The pass that a session was in: sessions, rows computed for all of them, and microseconds of moving KV."""

    sessions: int
    rows: int
    realign_us: int


class Passed(NamedTuple):
    """What a session gets for its request."""

    result: ForwardResult
    share: PassShare


class PassStatistics:
    """Counters since the start; see the message BatchStats. Added to on the worker's thread, read from any."""

    def __init__(self) -> None:
        self.passes = self.sessions = self.rows = self.computed_rows = 0
        self.pass_us = self.realign_us = self.longest_wait_us = 0

    def add(self, share: PassShare, *, rows: int, seconds: float, longest_wait: float) -> None:
        """A pass is over.

        Args:
            share: of its sessions.
            rows: that they asked for.
            seconds: that it took.
            longest_wait: of one of its sessions, in seconds.
        """
        self.passes += 1
        self.sessions += share.sessions
        self.rows += rows
        self.computed_rows += share.rows
        self.pass_us += round(seconds * 1e6)
        self.realign_us += share.realign_us
        self.longest_wait_us = max(self.longest_wait_us, round(longest_wait * 1e6))
