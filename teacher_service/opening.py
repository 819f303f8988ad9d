"""What a session asks for when it opens, and the limits it is held to.

Plain values: the message they came from, the model and the slot are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_pangu.speculation.parameters import MOST_LOGPROBS, SamplingParameters
from protos.errors import InvalidFieldError

REQUEST_ID_CHARACTERS = 128
HIGHEST_PRIORITY = 100


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
    sampling: how tokens are decided. answer_start: how many tokens of `prompt` are prompt; the rest is answer.
    logprobs: how many of the best tokens to give log-probabilities of, beside those decided; None: of none at all.
    prompt_logprobs: the same beside the prompt's own tokens. priority: in the queue for a slot, higher ones come first.
    """

    epoch: int
    request_id: str
    prompt: NDArray[np.int64]
    max_new_tokens: int
    max_rows: int
    max_depth: int
    want_features: bool
    sampling: SamplingParameters
    answer_start: int
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int

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
        self._validate_budget(limits)
        self._validate_prompt(limits)
        self.sampling.validate(limits.vocab_size, field="open.sampling")
        if not 0 <= self.answer_start <= len(self.prompt):
            raise InvalidFieldError("open.answer_start", f"expected 0 to {len(self.prompt)}, got {self.answer_start}")
        for field, top in (("open.logprobs", self.logprobs), ("open.prompt_logprobs", self.prompt_logprobs)):
            if top is not None and top > MOST_LOGPROBS:
                raise InvalidFieldError(field, f"expected at most {MOST_LOGPROBS}, got {top}")
        if abs(self.priority) > HIGHEST_PRIORITY:
            expected = f"expected -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
            raise InvalidFieldError("open.priority", f"{expected}, got {self.priority}")
        most = limits.slot_capacity - len(self.prompt) - self.max_rows
        if not 1 <= self.max_new_tokens <= most:
            why = f"{_slot(limits)} less {len(self.prompt)} prompt tokens and {self.max_rows} tree rows"
            raise InvalidFieldError("open.max_new_tokens", f"expected 1 to {most} ({why}), got {self.max_new_tokens}")

    def _validate_budget(self, limits: Limits) -> None:
        for name, asked, most in (
            ("rows", self.max_rows, limits.max_rows),
            ("depth", self.max_depth, limits.max_depth),
        ):
            if asked > most:
                raise InvalidFieldError(f"open.max_budget.{name}", f"expected at most {most}, got {asked}")
        most = limits.slot_capacity - 2
        if self.max_rows > most:  # before the prompt, whose own room would be none or less
            why = f"{_slot(limits)} less a prompt and an answer token"
            raise InvalidFieldError("open.max_budget.rows", f"expected at most {most} ({why}), got {self.max_rows}")

    def _validate_prompt(self, limits: Limits) -> None:
        field = "open.prompt_token_ids"
        longest, why = limits.context_limit - 1, f"the model's context of {limits.context_limit} less an answer token"
        in_slot = limits.slot_capacity - self.max_rows - 1
        if in_slot < longest:
            longest, why = in_slot, f"{_slot(limits)} less {self.max_rows} tree rows and an answer token"
        if not 1 <= len(self.prompt) <= longest:
            raise InvalidFieldError(field, f"expected 1 to {longest} tokens ({why}), got {len(self.prompt)}")
        wrong = np.flatnonzero((self.prompt < 0) | (self.prompt >= limits.vocab_size))
        if wrong.size:
            at = int(wrong[0])
            raise InvalidFieldError(field, f"expected an id in [0, {limits.vocab_size}), got {self.prompt[at]}", at)


def _slot(limits: Limits) -> str:
    """A slot in the words of whoever configures it."""
    return f"a slot of {limits.slot_capacity} tokens, teacher.slot_capacity,"
