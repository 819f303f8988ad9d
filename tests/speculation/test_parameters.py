"""What a request may ask of the deciding of its tokens: every rule broken alone, and what is legal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle_pangu.speculation.parameters import SamplingParameters
from protos.errors import InvalidFieldError
from tests.speculation.test_processors import ALL, PROCESSORS, VOCAB

NAN, INF = float("nan"), float("inf")
BROKEN: dict[str, tuple[dict[str, object], str, int | None, str]] = {
    "temperature below 0": ({"temperature": -0.5}, "temperature", None, "got -0.5"),
    "temperature that overflows": ({"temperature": 1e-9}, "temperature", None, "0 .greedy. or a number in"),
    "temperature over 100": ({"temperature": 100.5}, "temperature", None, "got 100.5"),
    "temperature NaN": ({"temperature": NAN}, "temperature", None, "got nan"),
    "top_k below 0": ({"top_k": -1}, "top_k", None, "0 .off. or more, got -1"),
    "top_p 0": ({"top_p": 0.0}, "top_p", None, r"in \(0, 1\], got 0.0"),
    "top_p over 1": ({"top_p": 1.01}, "top_p", None, "got 1.01"),
    "top_p NaN": ({"top_p": NAN}, "top_p", None, "got nan"),
    "min_p below 0": ({"min_p": -0.1}, "min_p", None, r"in \[0, 1\], got -0.1"),
    "min_p NaN": ({"min_p": NAN}, "min_p", None, "got nan"),
    "seed below 0": ({"seed": -1}, "seed", None, "got -1"),
    "seed too large": ({"seed": 2**64}, "seed", None, "got 18446744073709551616"),
    "repetition penalty 0": ({"repetition_penalty": 0.0}, "repetition_penalty", None, "got 0.0"),
    "repetition penalty infinite": ({"repetition_penalty": INF}, "repetition_penalty", None, "got inf"),
    "frequency penalty over 2": ({"frequency_penalty": 2.5}, "frequency_penalty", None, "got 2.5"),
    "presence penalty NaN": ({"presence_penalty": NAN}, "presence_penalty", None, "got nan"),
    "min_tokens below 0": ({"min_tokens": -1}, "min_tokens", None, "got -1"),
    "bias too large": ({"logit_bias": ((1, 0.0), (2, -100.5))}, "logit_bias", 1, "got -100.5"),
    "bias NaN": ({"logit_bias": ((1, NAN),)}, "logit_bias", 0, "got nan"),
    "bias past the vocabulary": ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias", 0, r"in \[0, 40\), got 40"),
    "bias twice": ({"logit_bias": ((1, 1.0), (2, 1.0), (1, 1.0))}, "logit_bias", 2, "distinct ids, got 1 twice"),
    "empty bad word": ({"bad_words": ((1, 2), ())}, "bad_words", 1, "at least one token"),
    "bad word past the vocabulary": ({"bad_words": ((1, 2), (3, VOCAB))}, "bad_words", 1, "got 40"),
    "negative end": ({"end_token_ids": (1, -1)}, "end_token_ids", 1, "got -1"),
    "allowed past the vocabulary": ({"allowed_token_ids": (1, 2, 99)}, "allowed_token_ids", 2, "got 99"),
    "nothing but the end": (
        {"allowed_token_ids": (1, 2), "end_token_ids": (2, 1), "min_tokens": 3},
        "allowed_token_ids",
        None,
        "a token to be left",
    ),
    "every allowed token is a bad word's end": (
        {"allowed_token_ids": (1, 2), "bad_words": ((1,), (5, 2))},
        "allowed_token_ids",
        None,
        "a token to be left",
    ),
    "every token is a bad word": (
        {"bad_words": tuple((i,) for i in range(1, VOCAB)), "end_token_ids": (0,), "min_tokens": 1},
        "bad_words",
        None,
        "a token to be left",
    ),
}


@pytest.mark.parametrize(("changes", "field", "row", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_is_refused_with_its_field(
    changes: dict[str, object], field: str, row: int | None, reason: str
) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        replace(SamplingParameters(), **changes).validate(VOCAB, field="open.sampling")  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.row) == (f"open.sampling.{field}", row)


def test_every_broken_rule_is_told_once_a_field() -> None:
    parameters = SamplingParameters(
        temperature=-1.0, top_p=0.0, logit_bias=((1, 200.0), (VOCAB, 0.0)), bad_words=((), (VOCAB,)), min_tokens=-1
    )
    told = [(each.field, each.row) for each in parameters.violations(VOCAB, field="options")]
    assert told == [
        ("options.temperature", None),
        ("options.top_p", None),
        ("options.min_tokens", None),
        ("options.logit_bias", 0),
        ("options.bad_words", 0),
    ]


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(),
        ALL,
        SamplingParameters(100.0, 10**6, 1.0, 1.0, 2**64 - 1, 100.0, -2.0, 2.0, ((0, -100.0), (39, 100.0))),
        SamplingParameters(end_token_ids=(1, 2), allowed_token_ids=(1, 2)),
        SamplingParameters(bad_words=((1,),), allowed_token_ids=(1, 2)),
    ],
)
def test_what_is_legal_passes(parameters: SamplingParameters) -> None:
    parameters.validate(VOCAB)


@pytest.mark.parametrize(
    ("parameters", "changes"),
    [
        (SamplingParameters(), False),
        (SamplingParameters(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, seed=7), False),
        (SamplingParameters(min_tokens=5), False),
        (SamplingParameters(end_token_ids=(5,)), False),
        *((parameters, True) for parameters, _ in PROCESSORS.values()),
    ],
)
def test_parameters_know_whether_they_change_logits(parameters: SamplingParameters, changes: bool) -> None:
    assert parameters.changes_logits is changes
    assert parameters.is_greedy is (parameters.temperature == 0)
