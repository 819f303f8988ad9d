"""What a session asks for when it opens, and the rules it is held to.

Plain values: the message they came from and the drafter are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import Budget
from protos.errors import InvalidFieldError

REQUEST_ID_CHARACTERS = 128


@dataclass(frozen=True, eq=False)
class Opening:
    """A request for a session.

    epoch: the opener's number for this session. request_id: for logs. drafter: name, never empty. prompt: token ids.
    max_budget: largest tree that will be asked for. vocab_size, context_limit, feature_width: of the teacher.
    """

    epoch: int
    request_id: str
    drafter: str
    prompt: Sequence[int]
    max_budget: Budget
    vocab_size: int
    context_limit: int
    feature_width: int

    def validate(self, most: Budget) -> None:
        """Check every rule of OpenDraftSession but the drafter's name and the fingerprint.

        Args:
            most: largest budget that the service allows.

        Raises:
            InvalidFieldError: names the field, and the token at fault when it is one.
        """
        if not 1 <= len(self.request_id) <= REQUEST_ID_CHARACTERS or not self.request_id.isprintable():
            raise InvalidFieldError("open.request_id", f"expected 1 to {REQUEST_ID_CHARACTERS} printable characters")
        if not 1 <= len(self.prompt) <= self.context_limit:
            raise InvalidFieldError(
                "open.prompt_token_ids",
                f"expected 1 to {self.context_limit} tokens (the teacher's context limit), got {len(self.prompt)}",
            )
        check_ids("open.prompt_token_ids", self.prompt, self.vocab_size)
        check_budget("open.max_budget", self.max_budget, most)


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidFieldError at the first id that is not in [0, vocab_size)."""
    if token_ids and max(token_ids) >= vocab_size:
        row = next(row for row, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidFieldError(field, f"expected an id in [0, {vocab_size}), got {token_ids[row]}", row)


def check_budget(field: str, asked: Budget, most: Budget) -> None:
    """Raise InvalidFieldError where a budget asks for more than `most`."""
    for name, wanted, limit in (("rows", asked.rows, most.rows), ("depth", asked.depth, most.depth)):
        if wanted > limit:
            raise InvalidFieldError(f"{field}.{name}", f"expected at most {limit}, got {wanted}")
