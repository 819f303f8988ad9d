"""What a deployment allows a request to ask for."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.requests import TEACHER_ONLY


@dataclass(frozen=True)
class Limits:
    """What this deployment allows, and what it takes for fields that a request leaves out.

    vocab_size: every id is smaller. context_limit: longest sequence, prompt and answer together, in tokens.
    eos_token_ids: ids that end an answer. prompt_bytes: longest text of a prompt, in UTF-8. max_tokens: largest that a
    request may name. answers: most of them to one request. rows, depth: largest budget that a request may name. The
    default_* fields are within them.
    """

    vocab_size: int
    context_limit: int
    eos_token_ids: tuple[int, ...]
    prompt_bytes: int
    max_tokens: int
    answers: int
    rows: int
    depth: int
    default_max_tokens: int
    default_rows: int
    default_depth: int
    default_drafter: str = TEACHER_ONLY
