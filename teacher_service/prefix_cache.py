"""The KV of sessions, running and ended, that a session whose prompt begins alike starts from.

What a session has committed is final, and every session of one teacher computes it to the same bits (DESIGN §7), so
copying it is as good as reading the tokens again. Everything but `stats` belongs on the worker's thread, where no
pass can be under way meanwhile. It knows neither the engine nor how a session works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.cache import KeptColumns, Slot


@dataclass(frozen=True, eq=False)
class Prefix:
    """Committed tokens and what was computed of them.

    token_ids: [tokens] int64. kv: as many columns. features: parts that are [tokens, feature_width] bits of bfloat16
    together; None: not recorded.
    """

    token_ids: NDArray[np.int64]
    kv: Slot | KeptColumns
    features: Sequence[NDArray[np.uint16]] | None

    def serves(self, want_features: bool) -> bool:
        """Whether a session with such a wish can start from it."""
        return self.features is not None or not want_features

    def covers(self, other: Prefix) -> bool:
        """Whether it serves every session that `other` serves, as far."""
        length = len(other.token_ids)
        return self.serves(other.features is not None) and np.array_equal(self.token_ids[:length], other.token_ids)


class Reused(NamedTuple):
    """What a session starts with: the first `length` columns of `kv`; features [length, feature_width] when wanted."""

    length: int
    kv: Slot | KeptColumns
    features: NDArray[np.uint16] | None


class Source(Protocol):
    """A running session."""

    def prefix(self) -> Prefix | None:
        """All that it has committed; None when there is nothing that others should rely on."""


class PrefixCacheStats(NamedTuple):
    """See the message of that name."""

    token_limit: int
    tokens: int
    entries: int
    sessions: int
    hits: int
    hit_tokens: int


class PrefixCache:
    """Finds the longest beginning that a prompt shares with a session that runs, or with one that ended and is kept.

    Args:
        token_limit: most tokens kept of sessions that ended, the least recently used ones dropped first; 0: nothing is
            kept and nothing is found.
    """

    def __init__(self, token_limit: int) -> None:
        self._token_limit = token_limit
        self._running: dict[Source, None] = {}
        self._kept: list[Prefix] = []  # the least recently used one first
        self._sessions = self._hits = self._hit_tokens = 0

    @property
    def enabled(self) -> bool:
        """Whether sessions can ever start from others."""
        return self._token_limit > 0

    def stats(self) -> PrefixCacheStats:
        """From any thread; while the worker works its figures may be one session apart."""
        kept = self._kept
        return PrefixCacheStats(
            self._token_limit, _tokens(kept), len(kept), self._sessions, self._hits, self._hit_tokens
        )

    def find(self, prompt: NDArray[np.int64], *, want_features: bool) -> Reused | None:
        """The most that a new session can start with, or None. The caller copies it before any other work runs.

        At most ``len(prompt) - 1`` tokens: the first token of the answer is decided from the last one's logits.
        """
        best, length = self._best(prompt, want_features)
        if best is None:
            return None
        if best in self._kept:
            self._use(best)
        self._hits += 1
        self._hit_tokens += length
        features = np.concatenate(best.features)[:length] if want_features and best.features is not None else None
        return Reused(length, best.kv, features)

    def will_have_more(
        self, prompt: NDArray[np.int64], *, want_features: bool, read: NDArray[np.int64], read_length: int
    ) -> bool:
        """Whether `prompt` could begin with more than it can now, once `read` is read past its first `read_length`."""
        common = _common_length(read, prompt[:-1], read_length) if self.enabled else 0
        return common > 0 and common > self._best(prompt, want_features)[1]

    def join(self, session: Source) -> None:
        """A session has begun; later ones may start from it."""
        self._sessions += 1
        if self.enabled:
            self._running[session] = None

    def leave(self, session: Source) -> None:
        """A session ends: keep what it has committed. Nothing to do for one that never joined."""
        if session in self._running:
            del self._running[session]
            prefix = session.prefix()
            if prefix is not None:
                self._keep(prefix)

    def _keep(self, prefix: Prefix) -> None:
        if len(prefix.token_ids) > self._token_limit:
            return
        for kept in self._kept:
            if kept.covers(prefix):
                self._use(kept)
                return
        staying = [kept for kept in self._kept if not prefix.covers(kept)]
        while _tokens(staying) + len(prefix.token_ids) > self._token_limit:
            del staying[0]
        self._kept = staying  # before the copy, so that there is room for it
        assert not isinstance(prefix.kv, KeptColumns)  # it is of a session that has just ended
        features = None if prefix.features is None else [np.concatenate(prefix.features)]
        self._kept.append(Prefix(prefix.token_ids.copy(), prefix.kv.keep(), features))

    def _best(self, prompt: NDArray[np.int64], want_features: bool) -> tuple[Prefix | None, int]:
        """The prefix that goes furthest, and how far."""
        usable = prompt[:-1]
        best, length = None, 0
        for prefix in self._all():
            if prefix.serves(want_features) and (common := _common_length(prefix.token_ids, usable, length)):
                best, length = prefix, common
        return best, length

    def _use(self, kept: Prefix) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)

    def _all(self) -> Iterator[Prefix]:
        """Kept ones first, the last used one before all: where several serve as well it is used again."""
        running = (session.prefix() for session in self._running)
        return chain(reversed(self._kept), (prefix for prefix in running if prefix is not None))


def _common_length(one: NDArray[np.int64], other: NDArray[np.int64], more_than: int) -> int:
    """How many tokens the two begin alike with, when that is more than so many; else 0."""
    shorter = min(len(one), len(other))
    if shorter <= more_than or one[more_than] != other[more_than]:  # most differ there: no need to compare them whole
        return 0
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    common = int(different[0]) if different.size else shorter
    return common if common > more_than else 0


def _tokens(kept: Sequence[Prefix]) -> int:
    return sum(len(prefix.token_ids) for prefix in kept)
