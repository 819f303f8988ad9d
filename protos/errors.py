"""The one error type for input that a peer or a caller got wrong.

It stands at the bottom of the house so that the codec, the token tree and the services raise the same thing; one table
(`eagle_pangu.serving.errors`) maps it to a gRPC status. It knows nothing of gRPC itself.
"""

from collections.abc import Sequence


class InvalidFieldError(ValueError):
    """A field breaks its documented rule.

    Attributes:
        field: Path of the field as the .proto names it, such as ``tree.parents``.
        reason: What was expected and what came, in one sentence without the field's name.
        row: Row of a token tree, or index into a repeated field, at fault; None when the fault is not in one element.
    """

    def __init__(self, field: str, reason: str, row: int | None = None) -> None:
        self.field = field
        self.reason = reason
        self.row = row
        where = field if row is None else f"{field}[{row}]"
        super().__init__(f"{where}: {reason}")


class StaleMessageError(Exception):
    """A message speaks of an epoch, round or committed length that is not the session's own.

    Attributes:
        field: The field that disagrees.
        reason: Both values, in one sentence.
    """

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}")


class InvalidRequestError(ValueError):
    """Several fields of one request break their rules; told to the caller together, so that one try finds them all.

    Attributes:
        violations: One error a field, in the order in which they were found; never empty.
    """

    def __init__(self, violations: Sequence[InvalidFieldError]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(map(str, violations)))
