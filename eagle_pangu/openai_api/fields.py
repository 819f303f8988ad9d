"""Types of request fields whose JSON has more than one form, each read into one.

A reader raises ValueError with what was expected; pydantic adds which field it was.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator

UINT32 = 2**32
LOST_IN_FLOAT32 = 2.0**-150
"""Whatever is this small is 0 as a float of 32 bits."""


def _read_prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        (value,) = value
    if isinstance(value, str) or _are_ids(value):
        return value  # type: ignore[no-any-return]
    raise ValueError("expected a string, a list of token ids, or a list of one of these (one prompt a request)")


def _read_stop(value: Any) -> list[str]:
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list) and all(isinstance(string, str) for string in strings):
        return strings
    raise ValueError("expected a string or a list of strings")


def _read_content(value: Any) -> str:
    """Text parts are joined as they are, with nothing between."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        return "".join(part["text"] for part in value)
    raise ValueError('expected a string or a list of text parts, {"type": "text", "text": ...}')


def _is_text_part(part: Any) -> bool:
    is_part = isinstance(part, dict) and part.keys() == {"type", "text"}
    return is_part and part["type"] == "text" and isinstance(part["text"], str)


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(item) is int and 0 <= item < UINT32 for item in value)  # a bool is an int to isinstance


def _check_not_lost(value: float) -> float:
    """The contract has 32 bits a number: what would become 0 there is no 0, which often means "off"."""
    if 0 < abs(value) <= LOST_IN_FLOAT32:
        raise ValueError("expected 0 or a number that is not 0 in 32 bits")
    return value


def _check_id_text(value: str) -> str:
    if value.isascii() and value.isdigit() and str(int(value)) == value and int(value) < UINT32:
        return value
    raise ValueError("expected a token id as the key")


Prompt = Annotated[str | list[int], PlainValidator(_read_prompt)]
"""Text, or token ids."""
Stop = Annotated[list[str], PlainValidator(_read_stop)]
Content = Annotated[str, PlainValidator(_read_content)]
Count = Annotated[int, Field(ge=0, lt=UINT32)]
"""Also a token id: whatever a uint32 of the contract holds. The ranges proper are the orchestrator's to check."""
Number = Annotated[float, AfterValidator(_check_not_lost)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenIdText = Annotated[str, Field(max_length=10), AfterValidator(_check_id_text)]
"""A token id as a JSON key, in its one spelling, so that no two keys mean one token."""
