"""What a session asks for when it opens, and the limits it is held to.

Plain values: the message they came from, the model and the slot are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.errors import InvalidFieldError

REQUEST_ID_CHARACTERS = 128


@dataclass(frozen=True)
class Limits:
    """What the teacher's model and configuration allow.

    vocab_size: every id is smaller. context_limit: longest sequence, in tokens. slot_capacity: tokens that one slot
    holds, speculative rows included. max_rows, max_depth: largest tree (drafted rows; depth of the deepest).
    """

    vocab_size: int
    context_limit: int
    slot_capacity: int
    max_rows: int
    max_depth: int


@dataclass(frozen=True, eq=False)
class Opening:
    """A request for a session.

    epoch: the opener's number for this session. request_id: for logs. prompt: [tokens] int64. max_new_tokens: answer
    tokens that may follow. max_rows, max_depth: largest tree of the session. want_features: send hidden states.
    """

    epoch: int
    request_id: str
    prompt: NDArray[np.int64]
    max_new_tokens: int
    max_rows: int
    max_depth: int
    want_features: bool

    @property
    def capacity(self) -> int:
        """Tokens of the slot: prompt, answer and the largest tree below the last root."""
        return len(self.prompt) + self.max_new_tokens + self.max_rows

    def validate(self, limits: Limits) -> None:
        """Check every rule of OpenTeacherSession but the fingerprint.

        Raises:
            InvalidFieldError: names the field, and the token at fault when it is one.
        """
        if not 1 <= len(self.request_id) <= REQUEST_ID_CHARACTERS or not self.request_id.isprintable():
            raise InvalidFieldError("open.request_id", f"expected 1 to {REQUEST_ID_CHARACTERS} printable characters")
        self._validate_prompt(limits)
        for name, asked, most in (
            ("rows", self.max_rows, limits.max_rows),
            ("depth", self.max_depth, limits.max_depth),
        ):
            if asked > most:
                raise InvalidFieldError(f"open.max_budget.{name}", f"expected at most {most}, got {asked}")
        if self.capacity > limits.slot_capacity:
            raise InvalidFieldError(
                "open.max_new_tokens",
                f"expected prompt + new tokens + tree rows within {limits.slot_capacity} tokens of a slot, "
                f"got {len(self.prompt)} + {self.max_new_tokens} + {self.max_rows} = {self.capacity}",
            )

    def _validate_prompt(self, limits: Limits) -> None:
        field, longest = "open.prompt_token_ids", limits.context_limit - 1
        if not 1 <= len(self.prompt) <= longest:
            raise InvalidFieldError(field, f"expected 1 to {longest} tokens, got {len(self.prompt)}")
        wrong = np.flatnonzero((self.prompt < 0) | (self.prompt >= limits.vocab_size))
        if wrong.size:
            at = int(wrong[0])
            raise InvalidFieldError(field, f"expected an id in [0, {limits.vocab_size}), got {self.prompt[at]}", at)
