"""Every rule of GenerationOptions in one list: a request in, a `Request` or all its violations out.

No field is ignored: what is not known or not supported is refused. Text is tokenised here, since "holds a token" and
"fits the context" are rules too. It starts nothing and asks nobody.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from eagle_pangu.speculation.parameters import MOST_LOGPROBS, SamplingParameters
from orchestrator.detokenizer import text_of
from orchestrator.limits import Limits
from orchestrator.prompts import PromptReading, quoted
from orchestrator.requests import TEACHER_ONLY, Request
from orchestrator.tokenizer import Tokenizer
from protos.codec import decode_sampling
from protos.errors import InvalidFieldError, InvalidRequestError
from protos.v1 import generation_pb2

REQUEST_ID_CHARACTERS = 128
MOST_STOPS = 16
STOP_CHARACTERS = 256
MOST_IDS = {"logit_bias": 1024, "stop_token_ids": 64, "bad_words": 256, "allowed_token_ids": 4096}
MOST_WORD_IDS = 64
MOST_PRIORITY = 100
"""Either way from 0."""
MOST_VIOLATIONS = 20
"""Told at once; a status travels in HTTP headers, which hold a few kilobytes."""


def choose_request_id(options: generation_pb2.GenerationOptions, from_metadata: str) -> str:
    """The id of a request: its own, else that of its metadata, else a new one (also in place of an invalid one)."""
    given = options.request_id or from_metadata
    return given if given and _is_request_id(given) else secrets.token_hex(16)


def read_request(
    message: generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest,
    *,
    request_id: str,
    limits: Limits,
    tokenizer: Tokenizer,
    drafters: Collection[str] | None,
    traceparent: str = "",
) -> Request:
    """Check every rule of GenerationOptions, and fill in what the request leaves out.

    Blocks for as long as it takes to tokenise the prompt: for long prompts call it off the event loop.

    Args:
        message: as it came.
        request_id: as `choose_request_id` gave it.
        limits: of the deployment.
        tokenizer: the teacher's.
        drafters: names on offer, "none" left out; None: not known now, so every name is taken.
        traceparent: handed on.

    Raises:
        InvalidRequestError: holds every violation, up to MOST_VIOLATIONS of them.
    """
    options = message.options
    reading = _Reading(options, limits, tokenizer)
    reading.check_unknown(message)
    reading.check_scalars()
    reading.check_answers(streams=isinstance(message, generation_pb2.GenerateStreamRequest))
    reading.check_stops()
    reading.check_ids()
    reading.check_drafter(drafters)
    sampling = reading.sampling()
    rows, depth = reading.budget()
    prompt = PromptReading(options, limits, tokenizer, reading.violations).token_ids()
    if reading.violations:
        raise InvalidRequestError(reading.violations[:MOST_VIOLATIONS])
    asked = options.max_tokens if options.HasField("max_tokens") else limits.default_max_tokens
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        max_tokens=min(asked, limits.context_limit - len(prompt)),
        stop=tuple(options.stop),
        include_stop=options.include_stop,
        sampling=sampling,
        logprobs=options.logprobs if options.HasField("logprobs") else None,
        drafter=options.drafter or limits.default_drafter,
        rows=rows,
        depth=depth,
        return_margins=options.return_margins,
        traceparent=traceparent,
        answers=options.n if options.HasField("n") else 1,
        echo=text_of(tokenizer, prompt) if options.echo else None,
        prompt_logprobs=options.prompt_logprobs if options.HasField("prompt_logprobs") else None,
        priority=options.priority,
        stream_tokens=options.stream_tokens,
    )


class _Reading:
    """The checks of one request, each adding to `violations`."""

    def __init__(self, options: generation_pb2.GenerationOptions, limits: Limits, tokenizer: Tokenizer) -> None:
        self.violations: list[InvalidFieldError] = []
        self._options = options
        self._limits = limits
        self._tokenizer = tokenizer

    def check_unknown(self, message: ProtoMessage) -> None:
        for field, number in _unknown_fields(message, ""):
            self._refuse(field or "request", f"field number {number} is not known here")

    def check_scalars(self) -> None:
        options, limits = self._options, self._limits
        if options.request_id and not _is_request_id(options.request_id):
            self._refuse("options.request_id", f"expected at most {REQUEST_ID_CHARACTERS} printable characters")
        if options.HasField("max_tokens") and not 1 <= options.max_tokens <= limits.max_tokens:
            self._refuse("options.max_tokens", f"expected 1 to {limits.max_tokens}, got {options.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if options.HasField(name) and (asked := getattr(options, name)) > MOST_LOGPROBS:
                self._refuse(f"options.{name}", f"expected at most {MOST_LOGPROBS}, got {asked}")

    def check_answers(self, *, streams: bool) -> None:
        """How many there are, and how they are served and sent. streams: the call is a stream."""
        options, most = self._options, self._limits.answers
        if options.HasField("n") and not 1 <= options.n <= most:
            self._refuse("options.n", f"expected 1 to {most}, got {options.n}")
        if abs(options.priority) > MOST_PRIORITY:
            self._refuse("options.priority", f"expected -{MOST_PRIORITY} to {MOST_PRIORITY}, got {options.priority}")
        if options.stream_tokens and not streams:
            self._refuse(
                "options.stream_tokens", "expected false, since Generate sends one message; use GenerateStream"
            )

    def check_ids(self) -> None:
        """How many ids there may be; which ones is `SamplingParameters`' to say, but for those that end the answer."""
        options = self._options
        for name, most in MOST_IDS.items():
            given = len(getattr(options, name))
            if given > most:
                self._refuse(f"options.{name}", f"expected at most {most} entries, got {given}")
        for index, word in enumerate(options.bad_words[: MOST_IDS["bad_words"]]):
            if len(word.token_ids) > MOST_WORD_IDS:
                given = len(word.token_ids)
                self._refuse("options.bad_words", f"expected at most {MOST_WORD_IDS} ids, got {given}", index)
        for index, token_id in enumerate(options.stop_token_ids[: MOST_IDS["stop_token_ids"]]):
            if token_id >= self._limits.vocab_size:
                expected = f"expected an id in [0, {self._limits.vocab_size}), got {token_id}"
                self._refuse("options.stop_token_ids", expected, index)

    def check_stops(self) -> None:
        stop = self._options.stop
        if len(stop) > MOST_STOPS:
            self._refuse("options.stop", f"expected at most {MOST_STOPS} strings, got {len(stop)}")
        for index, string in enumerate(stop[:MOST_STOPS]):
            if not 1 <= len(string) <= STOP_CHARACTERS:
                self._refuse("options.stop", f"expected 1 to {STOP_CHARACTERS} characters, got {len(string)}", index)

    def sampling(self) -> SamplingParameters:
        """How tokens are decided, with a seed of its own where none is given."""
        options = self._options
        parameters = SamplingParameters(
            **decode_sampling(options),
            seed=options.seed if options.HasField("seed") else secrets.randbits(64),
            logit_bias=tuple(sorted(options.logit_bias.items())),
            end_token_ids=self.end_token_ids(),
        )
        self.violations += parameters.violations(self._limits.vocab_size, field="options")
        return parameters

    def end_token_ids(self) -> tuple[int, ...]:
        """Those that end the answer: of the model unless they are ignored, then those asked for that exist."""
        options, limits = self._options, self._limits
        eos_token_ids = () if options.ignore_eos else limits.eos_token_ids
        asked = (token_id for token_id in options.stop_token_ids if token_id < limits.vocab_size)
        return tuple(dict.fromkeys([*eos_token_ids, *asked]))

    def check_drafter(self, drafters: Collection[str] | None) -> None:
        name = self._options.drafter
        if name in ("", TEACHER_ONLY) or drafters is None or name in drafters:
            return
        offered = ", ".join([*drafters, TEACHER_ONLY])
        self._refuse("options.drafter", f"expected one of {offered}, got {quoted(name)}")

    def budget(self) -> tuple[int, int]:
        """Rows and depth."""
        options, limits = self._options, self._limits
        if not options.HasField("budget"):
            return limits.default_rows, limits.default_depth
        rows, depth = options.budget.rows, options.budget.depth
        for name, asked, most in (("rows", rows, limits.rows), ("depth", depth, limits.depth)):
            if asked > most:
                self._refuse(f"options.budget.{name}", f"expected at most {most}, got {asked}")
        return rows, depth

    def _refuse(self, field: str, reason: str, row: int | None = None) -> None:
        self.violations.append(InvalidFieldError(field, reason, row))


def _is_request_id(text: str) -> bool:
    return len(text) <= REQUEST_ID_CHARACTERS and text.isprintable()


def _unknown_fields(message: ProtoMessage, path: str) -> list[tuple[str, int]]:
    """Path and number of each field that this version of the contract does not have, however deep."""
    found = [(path, unknown.field_number) for unknown in UnknownFieldSet(message)]  # type: ignore[attr-defined]
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:  # our maps hold numbers
            continue
        inner = f"{path}.{descriptor.name}" if path else descriptor.name
        for each in [value] if isinstance(value, ProtoMessage) else value:
            found += _unknown_fields(each, inner)
    return found
