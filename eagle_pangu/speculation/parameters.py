"""How a request wants its tokens decided, and the rules that its wishes are held to.

No torch: the orchestrator reads it. What the parameters do is written where it is done, in `processors` and `sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from protos.errors import InvalidFieldError

MOST_LOGPROBS = 20
"""Of the best tokens at one place."""

# As the wire has them, in float32: a caller may name the bound itself.
_LEAST_TEMPERATURE, _LEAST_PENALTY = float(np.float32(1e-6)), float(np.float32(0.01))

# Field -> what it may be, in code (false for NaN) and in words. The bounds keep every score finite in float32.
_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (
        lambda value: value == 0 or _LEAST_TEMPERATURE <= value <= 100,
        "0 (greedy) or a number in [1e-06, 100]",
    ),
    "top_k": (lambda value: value >= 0, "0 (off) or more"),
    "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
    "seed": (lambda value: 0 <= value < 2**64, "an integer in [0, 2^64)"),
    "repetition_penalty": (lambda value: _LEAST_PENALTY <= value <= 100, "a number in [0.01, 100]"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "a number in [-2, 2]"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "a number in [-2, 2]"),
    "min_tokens": (lambda value: value >= 0, "0 (off) or more"),
}


@dataclass(frozen=True)
class SamplingParameters:
    """How a request wants its tokens decided; the defaults are plain greedy decoding.

    Args:
        temperature: divides the logits; 0 takes the best token, and `top_k`, `top_p`, `min_p` and `seed` do nothing.
        top_k: sample from so many best tokens; 0 is off.
        top_p: sample from the fewest best tokens that hold this probability together; 1 is off.
        min_p: sample from tokens of at least this part of the best one's probability; 0 is off.
        seed: of the noise; the same seed gives the same tokens.
        repetition_penalty: divides positive logits of tokens in prompt or answer, multiplies negative ones; 1 is off.
        frequency_penalty: logits less for each time that the answer has the token.
        presence_penalty: logits less where the answer has the token at all.
        logit_bias: (token id, logits more), ids distinct.
        min_tokens: ban `end_token_ids` until the answer has so many tokens.
        end_token_ids: what `min_tokens` holds back: end of text and stop ids.
        bad_words: token sequences that are never completed.
        allowed_token_ids: ban all others; empty is off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """The best token is taken, nothing is drawn."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are left out before one is drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether any penalty is on."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def holds_back_end(self) -> bool:
        """Whether `min_tokens` bans anything."""
        return self.min_tokens > 0 and bool(self.end_token_ids)

    @property
    def changes_logits(self) -> bool:
        """Whether `process` does anything."""
        return (
            self.penalises or self.holds_back_end or bool(self.logit_bias or self.bad_words or self.allowed_token_ids)
        )

    @cached_property
    def allowed(self) -> NDArray[np.int64]:
        """`allowed_token_ids` as an array: they may be thousands."""
        return np.array(self.allowed_token_ids, dtype=np.int64)

    @cached_property
    def bad_word_ends(self) -> dict[tuple[int, ...], list[int]]:
        """All but the last token of the bad words -> the last tokens that are banned after it."""
        ends: dict[tuple[int, ...], list[int]] = {}
        for *start, end in self.bad_words:
            ends.setdefault(tuple(start), []).append(end)
        return ends

    def validate(self, vocab_size: int, *, field: str = "sampling") -> None:
        """Raise the first of `violations`.

        Raises:
            InvalidFieldError: names the field, and for a repeated field the first entry at fault.
        """
        for violation in self.violations(vocab_size, field=field):
            raise violation

    def violations(self, vocab_size: int, *, field: str = "sampling") -> Iterator[InvalidFieldError]:
        """Every rule that is broken, one violation a field; what breaks none leaves each row a token at least.

        Args:
            vocab_size: every id must be smaller.
            field: path under which errors name these parameters.
        """
        wrong_before = False
        for violation in self._wrong_values(vocab_size, field):
            wrong_before = True
            yield violation
        if not wrong_before:  # else what is left to choose from cannot be told
            yield from self._wrong_choice(vocab_size, field)

    def _wrong_values(self, vocab_size: int, field: str) -> Iterator[InvalidFieldError]:
        for name, (is_legal, expected) in _RULES.items():
            value = getattr(self, name)
            if not is_legal(value):
                yield InvalidFieldError(f"{field}.{name}", f"expected {expected}, got {value}")
        yield from islice(self._wrong_biases(vocab_size, f"{field}.logit_bias"), 1)
        yield from islice(self._wrong_bad_words(vocab_size, f"{field}.bad_words"), 1)
        for name in ("end_token_ids", "allowed_token_ids"):
            yield from islice(_wrong_ids(enumerate(getattr(self, name)), vocab_size, f"{field}.{name}"), 1)

    def _wrong_biases(self, vocab_size: int, field: str) -> Iterator[InvalidFieldError]:
        seen: set[int] = set()
        for entry, (token_id, bias) in enumerate(self.logit_bias):
            yield from _wrong_ids([(entry, token_id)], vocab_size, field)
            if not abs(bias) <= 100:
                yield InvalidFieldError(field, f"expected a bias of id {token_id} in [-100, 100], got {bias}", entry)
            if token_id in seen:
                yield InvalidFieldError(field, f"expected distinct ids, got {token_id} twice", entry)
            seen.add(token_id)

    def _wrong_bad_words(self, vocab_size: int, field: str) -> Iterator[InvalidFieldError]:
        for entry, word in enumerate(self.bad_words):
            if not word:
                yield InvalidFieldError(field, "expected at least one token, got none", entry)
            yield from _wrong_ids(((entry, token_id) for token_id in word), vocab_size, field)

    def _wrong_choice(self, vocab_size: int, field: str) -> Iterator[InvalidFieldError]:
        # Stricter than need be: a long bad word bans its end after some histories only. In return no row can ever run
        # out of tokens, and none needs a rule for which ban to break.
        bannable = {word[-1] for word in self.bad_words}
        if self.holds_back_end:
            bannable.update(self.end_token_ids)
        if bannable.issuperset(self.allowed_token_ids or range(vocab_size)):
            yield InvalidFieldError(
                f"{field}.{'allowed_token_ids' if self.allowed_token_ids else 'bad_words'}",
                "expected a token to be left that neither ends a bad word nor is held back by min_tokens, got none",
            )


def _wrong_ids(entries: Iterable[tuple[int, int]], vocab_size: int, field: str) -> Iterator[InvalidFieldError]:
    """Of pairs of an entry and an id in it."""
    for entry, token_id in entries:
        if not 0 <= token_id < vocab_size:
            yield InvalidFieldError(field, f"expected an id in [0, {vocab_size}), got {token_id}", entry)
