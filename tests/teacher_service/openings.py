"""A sound opening, and the limits that it is held to."""

import numpy as np

from eagle_pangu.speculation.parameters import SamplingParameters
from teacher_service.opening import Limits, Opening
from tests.teacher_service.fakes import CONTEXT_LIMIT, VOCAB_SIZE

LIMITS = Limits(vocab_size=VOCAB_SIZE, context_limit=CONTEXT_LIMIT, slot_capacity=200, max_rows=16, max_depth=8)
PROMPT = [11, 5, 80, 2, 41]


def opening(**changes) -> Opening:
    values = {
        "epoch": 4,
        "request_id": "r-1",
        "prompt": np.array(PROMPT),
        "max_new_tokens": 60,
        "max_rows": 8,
        "max_depth": 6,
        "want_features": False,
        "sampling": SamplingParameters(),
        "logprobs": None,
        "prompt_logprobs": None,
        "priority": 0,
    }
    return Opening(**{**values, "answer_start": len(changes.get("prompt", PROMPT)), **changes})
