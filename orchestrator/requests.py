"""A request as the rest of the orchestrator sees it: checked, tokenised, every default filled in. Knows no messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle_pangu.speculation.parameters import SamplingParameters

TEACHER_ONLY = "none"
"""The drafter name that asks for plain decoding."""


@dataclass(frozen=True)
class Request:
    """What to generate, and how.

    request_id: 1 .. 128 printable characters. prompt_token_ids: >= 1 ids of the teacher's vocabulary.
    max_tokens: most answer tokens, cut to the context limit already; >= 1. stop: strings that end the answer.
    include_stop: leave that string in the text. sampling: how tokens are decided, and the ids that end the answer; its
    seed is drawn if none was given. logprobs: how many of the best tokens to give log-probabilities of, beside those
    decided; None: of none at all. drafter: by name; "none": teacher-only; "": the draft service's default. rows, depth:
    budget of every tree. return_margins: top-2 logit margins wanted. traceparent: W3C trace context that the request
    came with; empty: none.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    logprobs: int | None = None
    drafter: str = TEACHER_ONLY
    rows: int = 0
    depth: int = 0
    return_margins: bool = False
    traceparent: str = ""

    @property
    def wants_draft(self) -> bool:
        """Trees of more than the root are asked for."""
        return self.drafter != TEACHER_ONLY and self.rows > 0 and self.depth > 0
