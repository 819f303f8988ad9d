"""What one turn of a benchmark yields: the answers of each way of decoding, and what comparing them says.

Plain values only. Summing up many turns is `summary`'s business, asking for an answer `bench`'s.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# Significant bits, the implicit one included.
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
LOGIT_BINADE = 16.0
NEAR_TIE_ULPS = 3


def near_tie_margin(dtype: str) -> float:
    """Largest top-2 logit margin that rounding alone may turn round, in logits: 0.375 in bfloat16.

    A number format resolves steps of one ulp: 2^(1 - bits) of the binade. The best logits of the models served here lie
    around 16 to 32, where a bfloat16 ulp is 0.125. Two computations that are both right round in every layer, and the
    two logits of a tie may move in opposite directions. Between one-row passes and a chunk, SmolLM2-135M-Instruct in
    bfloat16, the margin changed by more than 2 ulps at 1 in 70 of 352 positions, and by more than 3 at none. A wider
    margin on either side means that a computation, not a rounding, went differently.
    """
    return NEAR_TIE_ULPS * LOGIT_BINADE * 2.0 ** (1 - SIGNIFICANT_BITS[dtype])


class Message(NamedTuple):
    """One message of a conversation; role is "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class Numerics:
    """How the teacher computes, as it resolved it itself: TeacherNumerics in model.proto."""

    dtype: str
    policy: str
    mode: str
    degraded_reason: str = ""
    attention: str = ""
    attention_fallback_reason: str = ""

    @property
    def must_be_exact(self) -> bool:
        """Ids must be equal whatever the drafter; otherwise only near-ties may differ."""
        return self.policy == "bitwise" or self.dtype == "float32"


@dataclass(frozen=True)
class Timings:
    """Sums over the rounds of one answer, in microseconds; the fields of RoundTimings in generation.proto."""

    draft_us: int = 0
    wire_us: int = 0
    queue_us: int = 0
    teacher_us: int = 0
    commit_us: int = 0
    orchestrator_us: int = 0
    rounds_us: int = 0
    prefill_us: int = 0

    @property
    def outside_models_us(self) -> int:
        """Time of the rounds outside the two models' compute."""
        return max(0, self.rounds_us - self.draft_us - self.teacher_us)


@dataclass(frozen=True)
class Answer:
    """One turn answered in one way.

    seconds: wall time of the whole request as the caller saw it, prefill included. margins: the teacher's top-2 logit
    margin of each token, or empty when it is not known. request_id: under which a trace knows this answer.
    load_limited_rounds: rounds whose tree was cut because the teacher was shared.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    seconds: float
    prompt_tokens: int
    request_id: str = ""
    margins: tuple[float, ...] = ()
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafter: str = "none"
    fallback_rounds: int = 0
    fallback_reasons: tuple[str, ...] = ()
    load_limited_rounds: int = 0
    timings: Timings = field(default_factory=Timings)

    @property
    def tokens_per_round(self) -> float:
        """Tokens after the first (which prefill decides) per round; 0 without rounds."""
        return (len(self.token_ids) - 1) / self.rounds if self.rounds else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Wall time per answer token; what speed-ups compare, so that answers of unequal length compare fairly."""
        return self.seconds / len(self.token_ids)

    @property
    def decode_us_per_token(self) -> float:
        """Time of the rounds per token that they decided, prefill left out; 0 without such a token."""
        decided = len(self.token_ids) - 1
        return self.timings.rounds_us / decided if decided else 0.0


@dataclass(frozen=True)
class Divergence:
    """The first position at which an answer is not the teacher-only one.

    position: index into token_ids. teacher_only_token, token: what either answer has there; None where it had ended.
    margin: the teacher's top-2 logit margin there in the teacher-only run; other_margin: the same in the run compared;
    None where it is not known.
    """

    id: str
    turn: int
    position: int
    teacher_only_token: int | None
    token: int | None
    margin: float | None
    other_margin: float | None
    near_tie: bool


@dataclass(frozen=True)
class TurnRecord:
    """One turn of one prompt, answered teacher-only, and maybe with a drafter and by transformers' own generate.

    prompt_lookup: transformers' answer with its own prompt lookup.
    """

    id: str
    turn: int
    teacher_only: Answer
    speculative: Answer | None = None
    transformers: Answer | None = None
    prompt_lookup: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The answer under test: the speculative one, or the teacher-only one when no drafter was asked for."""
        return self.speculative or self.teacher_only

    @property
    def exact(self) -> bool | None:
        """The speculative answer has the ids and the finish reason of the teacher-only one; None without one."""
        return None if self.speculative is None else same(self.teacher_only, self.speculative)

    @property
    def transformers_exact(self) -> bool | None:
        """The teacher-only answer has the ids of transformers' generate; None when that did not run."""
        return None if self.transformers is None else same(self.teacher_only, self.transformers)

    @property
    def speedup(self) -> float | None:
        """Teacher-only time / time, whole requests, per token; None without a speculative answer."""
        if self.speculative is None:
            return None
        return self.teacher_only.seconds_per_token / self.speculative.seconds_per_token

    @property
    def prompt_lookup_speedup(self) -> float | None:
        """As `speedup`, of transformers' prompt lookup; None when that did not run."""
        if self.prompt_lookup is None:
            return None
        return self.teacher_only.seconds_per_token / self.prompt_lookup.seconds_per_token

    @property
    def decode_speedup(self) -> float | None:
        """As `speedup`, over the rounds alone; None where either answer has no round."""
        alone = self.teacher_only.decode_us_per_token
        drafted = 0.0 if self.speculative is None else self.speculative.decode_us_per_token
        return alone / drafted if alone and drafted else None

    def line(self) -> dict[str, Any]:
        """The object that turns.jsonl holds for this turn."""
        answer, alone = self.answer, self.teacher_only
        line: dict[str, Any] = {
            "id": self.id,
            "turn": self.turn,
            "prompt_tokens": answer.prompt_tokens,
            "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "drafter": answer.drafter,
            "rounds": answer.rounds,
            "drafted": answer.drafted,
            "accepted": answer.accepted,
            "tokens_per_round": answer.tokens_per_round,
            "speedup": self.speedup,
            "decode_speedup": self.decode_speedup,
            "exact": self.exact,
            "seconds": answer.seconds,
            "teacher_only_seconds": alone.seconds,
            "teacher_only_token_ids": list(alone.token_ids),
            "teacher_only_rounds": alone.rounds,
            "fallback_rounds": answer.fallback_rounds,
            "fallback_reasons": list(answer.fallback_reasons),
            "timings": asdict(answer.timings),
            "teacher_only_timings": asdict(alone.timings),
            "request_id": answer.request_id,
            "teacher_only_request_id": alone.request_id,
        }
        if self.transformers is not None:
            line["transformers_seconds"] = self.transformers.seconds
            line["transformers_token_ids"] = list(self.transformers.token_ids)
            line["transformers_exact"] = self.transformers_exact
        if self.prompt_lookup is not None:
            line["prompt_lookup_seconds"] = self.prompt_lookup.seconds
            line["prompt_lookup_token_ids"] = list(self.prompt_lookup.token_ids)
        return line


def same(one: Answer, other: Answer) -> bool:
    """Equal ids and finish reasons."""
    return one.token_ids == other.token_ids and one.finish_reason == other.finish_reason


def first_divergence(record: TurnRecord, other: Answer, near_tie: float) -> Divergence | None:
    """Where `other` first leaves the teacher-only answer of the same turn; None when the two are the same.

    It is a near-tie when both answers go on there and no known margin exceeds `near_tie`, in logits.
    """
    alone = record.teacher_only
    if same(alone, other):
        return None
    pairs = enumerate(zip(alone.token_ids, other.token_ids, strict=False))
    shorter = min(len(alone.token_ids), len(other.token_ids))
    position = next((index for index, (ours, theirs) in pairs if ours != theirs), shorter)
    margin, other_margin = _at(alone.margins, position), _at(other.margins, position)
    token, other_token = _at(alone.token_ids, position), _at(other.token_ids, position)
    widest = max((value for value in (margin, other_margin) if value is not None), default=math.inf)
    tie = token is not None and other_token is not None and widest <= near_tie
    return Divergence(record.id, record.turn, position, token, other_token, margin, other_margin, tie)


def _at(values: tuple[T, ...], position: int) -> T | None:
    return values[position] if position < len(values) else None
