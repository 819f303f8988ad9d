"""What a drafter is: a way of proposing token trees for a sequence that the teacher is writing.

A drafter belongs to the process and may hold a model; a draft session belongs to one sequence and holds what the
drafter remembers of it. What takes passes of a model is a generator: it yields what it wants computed and is sent the
outcome, so that the passes of many sessions can be one. Everything here blocks and is called from one thread at a time,
that of the drafter; nothing here knows of gRPC, epochs or rounds. Whatever a drafter proposes, the teacher decides: a
bad proposal costs speed, never a token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.tree import TokenTree

if TYPE_CHECKING:
    from eagle_pangu.speculation.buckets import SeenShapes  # torch is not needed to look tokens up

R = TypeVar("R")
"""What a session asks to be computed in a pass."""
S = TypeVar("S")
"""What the pass gave for it."""
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)


class DrafterError(Exception):
    """A drafter cannot be loaded, for a reason that the operator can mend; the text names the setting."""


class Budget(NamedTuple):
    """The most that one tree may hold.

    rows: drafted rows, the root not counted; depth: of the deepest drafted row.
    """

    rows: int
    depth: int


class ModelIdentity(NamedTuple):
    """The model behind a drafter, as far as it must fit the teacher.

    model: name, informative; tokenizer_sha256: lower-case hex; vocab_size: number of ids; eos_token_ids: ascending;
    feature_width: values of one token's features, 0 where the model reads none.
    """

    model: str
    tokenizer_sha256: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    feature_width: int = 0


class DraftSession(Protocol[R_co, S_contra]):
    """What a drafter remembers of one sequence. The last token of the sequence is the root of the next tree."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the teacher decided: those of an earlier proposal, or any others. Cheap."""
        ...

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        """Take the teacher's features of consecutive tokens; called only where the drafter needs them, without gaps.

        They may run ahead of `extend`: features of a round's tokens come with the verdict that decides those tokens.

        Args:
            start: position of the first token described, 0 the first prompt token.
            features: [tokens, feature_width] bits of bfloat16 values.
        """
        ...

    def advance(self) -> Generator[R_co, S_contra, None]:
        """Do the work that is pending, a bounded piece of it a pass (a chunk of the prompt).

        `propose` does whatever is still pending; running this between messages takes it off the path of a round.
        """
        ...

    def propose(self, budget: Budget) -> Generator[R_co, S_contra, TokenTree]:
        """A tree within the budget, with scores; the root alone when there is nothing to propose.

        The same sequence and budget give the same tree but for rounding, whatever was proposed before and whoever
        shared the passes. Abandoned before any pass, or where one fails, it leaves a session that can be asked again.
        """
        ...

    def close(self) -> None:
        """Free what the session holds; nothing is called afterwards."""
        ...


class Drafter(Protocol[R, S]):
    """One way of drafting, shared by many sessions."""

    @property
    def name(self) -> str:
        """Name on the wire."""
        ...

    @property
    def needs_features(self) -> bool:
        """The drafter reads the teacher's features."""
        ...

    @property
    def context_limit(self) -> int:
        """Longest sequence it can read, in tokens, past which proposals hold the root alone; 0: no limit."""
        ...

    @property
    def identity(self) -> ModelIdentity | None:
        """Its model; None where any teacher's ids will do."""
        ...

    def open(self, prompt: Sequence[int], max_budget: Budget) -> DraftSession[R, S]:
        """Begin a sequence. Quick: reading the prompt is left to `DraftSession.advance`.

        Args:
            prompt: >= 1 ids, valid for the teacher.
            max_budget: the largest that `propose` will be given.
        """
        ...

    @property
    def shapes(self) -> SeenShapes | None:
        """Distinct ones that its model has computed; None where they cost nothing."""
        ...

    def together(self, requests: Sequence[R]) -> int:
        """How many of the first of these share the next pass, >= 1."""
        ...

    def compute(self, requests: Sequence[R]) -> Sequence[S]:
        """One pass for what several sessions asked for, each another; in order.

        Where it raises, nothing was done that a repetition of any of them would not do again.
        """
        ...


def run_alone(drafter: Drafter[R, S], work: Generator[R, S, T]) -> T:
    """The value of a session's work, its passes shared with nobody."""
    try:
        request = next(work)
        while True:
            [outcome] = drafter.compute([request])
            request = work.send(outcome)
    except StopIteration as finished:
        value: T = finished.value
        return value
