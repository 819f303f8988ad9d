"""Checked reading of a JSON object: a field of the wrong kind is an error that names it.

A field that is null counts as missing, as every producer of heads has it. What the fields mean is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_pangu.speculation.eagle3.errors import HeadError


@dataclass(frozen=True)
class Fields:
    """A JSON object inside config.json.

    Attributes:
        values: the object.
        path: what its fields are called in an error: "" or "section.".
    """

    values: Mapping[str, Any]
    path: str = ""

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def section(self, name: str) -> Fields:
        """The object under that name; empty where there is none."""
        value = self.values.get(name)
        if value is None:
            return Fields({}, f"{self.path}{name}.")
        if not isinstance(value, dict):
            raise self.fault(name, "an object")
        return Fields(value, f"{self.path}{name}.")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fault(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.fault(name, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where there is none."""
        value = self.values[name] if self.has(name) else False
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; a missing field passes."""
        if self.has(name) and self.values[name] not in allowed:
            raise self.fault(name, " or ".join(repr(value) for value in allowed) or "none")

    def fault(self, name: str, expected: str) -> HeadError:
        """The error to raise when the field is not what was expected."""
        found = repr(self.values[name]) if self.has(name) else "none"
        return HeadError(f"config.json: {self.path}{name}: expected {expected}, found {found}")
