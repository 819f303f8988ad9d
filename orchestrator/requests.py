"""A request as the rest of the orchestrator sees it: checked, tokenised, every default filled in. Knows no messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
    came with; empty: none. answers: how many; >= 1. echo: the prompt's text, to begin every answer with; None: not
    asked for. prompt_logprobs: as logprobs, of the prompt's tokens. priority: among sessions that wait for the teacher
    higher ones come first. stream_tokens: one message a token, not one a round.
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
    answers: int = 1
    echo: str | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    stream_tokens: bool = False

    @property
    def wants_draft(self) -> bool:
        """Trees of more than the root are asked for."""
        return self.drafter != TEACHER_ONLY and self.rows > 0 and self.depth > 0

    def of_answer(self, index: int) -> Request:
        """What one of the answers asks of the services: a seed of its own, and the prompt's log-probabilities once."""
        return replace(
            self,
            sampling=replace(self.sampling, seed=(self.sampling.seed + index) % 2**64),
            prompt_logprobs=self.prompt_logprobs if index == 0 else None,
        )
