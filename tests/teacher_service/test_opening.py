"""What a session may ask for: every rule names its field, and the limit that binds."""

from dataclasses import replace

import numpy as np
import pytest

from protos.errors import InvalidFieldError
from tests.teacher_service.fakes import CONTEXT_LIMIT, VOCAB_SIZE
from tests.teacher_service.openings import LIMITS, opening

REFUSED = {
    "no request id": ({"request_id": ""}, "open.request_id", None),
    "a long request id": ({"request_id": "x" * 129}, "open.request_id", None),
    "a request id that does not print": ({"request_id": "a\nb"}, "open.request_id", None),
    "no prompt": ({"prompt": np.array([], dtype=np.int64)}, "open.prompt_token_ids", None),
    "a prompt of the context limit": ({"prompt": np.zeros(CONTEXT_LIMIT, int)}, "open.prompt_token_ids", None),
    "an id past the vocabulary": ({"prompt": np.array([1, 2, VOCAB_SIZE])}, "open.prompt_token_ids", 2),
    "too many rows": ({"max_rows": 17}, "open.max_budget.rows", None),
    "too much depth": ({"max_depth": 9}, "open.max_budget.depth", None),
    "no answer token": ({"max_new_tokens": 0}, "open.max_new_tokens", None),
    "more than a slot holds": ({"max_new_tokens": 188}, "open.max_new_tokens", None),
    "too many log-probabilities": ({"logprobs": 21}, "open.logprobs", None),
    "too many of the prompt": ({"prompt_logprobs": 21}, "open.prompt_logprobs", None),
    "a priority too high": ({"priority": 101}, "open.priority", None),
    "a priority too low": ({"priority": -101}, "open.priority", None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_opening_is_refused_by_field(name):
    changes, field, row = REFUSED[name]
    opening().validate(LIMITS)
    with pytest.raises(InvalidFieldError) as refused:
        opening(**changes).validate(LIMITS)
    assert (refused.value.field, refused.value.row) == (field, row)


def tokens(count: int) -> dict:
    return {"prompt": np.zeros(count, int)}


CONTEXT = "the model's context of 120 less an answer token"
SLOT = "a slot of {} tokens, teacher.slot_capacity, less {}"
ROOM = "8 tree rows and an answer token"

# The tokens of a slot (the context is one of 120), then the field that does not fit, and why.
TOO_LARGE = {
    "a prompt past the context of a large slot": (
        200,
        tokens(120),
        f"open.prompt_token_ids: expected 1 to 119 tokens ({CONTEXT}), got 120",
    ),
    "a prompt within the context and past a small slot": (
        100,
        tokens(92),
        f"open.prompt_token_ids: expected 1 to 91 tokens ({SLOT.format(100, ROOM)}), got 92",
    ),
    "a prompt past the context and past a smaller slot": (
        100,
        tokens(120),
        f"open.prompt_token_ids: expected 1 to 91 tokens ({SLOT.format(100, ROOM)}), got 120",
    ),
    "a prompt past a slot that is smaller by the rows alone": (
        127,
        tokens(119),
        f"open.prompt_token_ids: expected 1 to 118 tokens ({SLOT.format(127, ROOM)}), got 119",
    ),
    "an answer that does not fit beside its prompt": (
        100,
        {"max_new_tokens": 88},
        f"open.max_new_tokens: expected 1 to 87 ({SLOT.format(100, '5 prompt tokens and 8 tree rows')}), got 88",
    ),
    "a tree that leaves no room in the slot": (
        16,
        {"max_rows": 15},
        f"open.max_budget.rows: expected at most 14 ({SLOT.format(16, 'a prompt and an answer token')}), got 15",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_does_not_fit_is_told_the_limit_that_binds(name):
    slot_capacity, changes, text = TOO_LARGE[name]
    with pytest.raises(InvalidFieldError) as refused:
        opening(**changes).validate(replace(LIMITS, slot_capacity=slot_capacity))
    assert str(refused.value) == text


def test_an_opening_at_every_limit_is_taken():
    opening(max_new_tokens=187, max_rows=8).validate(LIMITS)
    opening(**tokens(CONTEXT_LIMIT - 1), max_new_tokens=1, max_rows=16, max_depth=8).validate(LIMITS)
    opening(**tokens(91), max_new_tokens=1).validate(replace(LIMITS, slot_capacity=100))
    opening(**tokens(1), max_new_tokens=1, max_rows=14).validate(replace(LIMITS, slot_capacity=16))
    opening(max_rows=0, max_depth=0).validate(LIMITS)
    opening(request_id="x" * 128).validate(LIMITS)
    opening(logprobs=20, prompt_logprobs=20, priority=100).validate(LIMITS)
    opening(logprobs=0, prompt_logprobs=0, priority=-100).validate(LIMITS)
