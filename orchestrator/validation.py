"""Every rule of GenerationOptions in one list: a request in, a `Request` or all its violations out.

No field is ignored: what is not known or not supported is refused. Text is tokenised here, since "holds a token" and
"fits the context" are rules too. It starts nothing and asks nobody.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from eagle_pangu.speculation.parameters import MOST_LOGPROBS, SamplingParameters
from orchestrator.requests import TEACHER_ONLY, Request
from orchestrator.tokenizer import ChatTemplateError, Message, Tokenizer
from protos.codec import decode_sampling
from protos.errors import InvalidFieldError, InvalidRequestError
from protos.v1 import generation_pb2

REQUEST_ID_CHARACTERS = 128
MOST_STOPS = 16
STOP_CHARACTERS = 256
MOST_IDS = {"logit_bias": 1024, "stop_token_ids": 64, "bad_words": 256, "allowed_token_ids": 4096}
MOST_WORD_IDS = 64
MOST_VIOLATIONS = 20
"""Told at once; a status travels in HTTP headers, which hold a few kilobytes."""
QUOTED_CHARACTERS = 40
TEMPLATE_MESSAGE_CHARACTERS = 300
GIVEN_IDS = "options.prompt_token_ids.ids"
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Limits:
    """What this deployment allows, and what it takes for fields that a request leaves out.

    vocab_size: every id is smaller. context_limit: longest sequence, prompt and answer together, in tokens.
    eos_token_ids: ids that end an answer. prompt_bytes: longest text of a prompt, in UTF-8. max_tokens: largest that a
    request may name. rows, depth: the same for its budget. The default_* fields are within them.
    """

    vocab_size: int
    context_limit: int
    eos_token_ids: tuple[int, ...]
    prompt_bytes: int
    max_tokens: int
    rows: int
    depth: int
    default_max_tokens: int
    default_rows: int
    default_depth: int
    default_drafter: str = TEACHER_ONLY


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
        InvalidRequestError: holds every violation, up to MOST_VIOLATIONS of them; of the rules that are
            `SamplingParameters`' own, the first one broken.
    """
    options = message.options
    reading = _Reading(options, limits, tokenizer)
    reading.check_unknown(message)
    reading.check_scalars()
    reading.check_stops()
    reading.check_ids()
    reading.check_drafter(drafters)
    sampling = reading.sampling()
    rows, depth = reading.budget()
    prompt = reading.prompt()
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
        if options.HasField("logprobs") and options.logprobs > MOST_LOGPROBS:
            self._refuse("options.logprobs", f"expected at most {MOST_LOGPROBS}, got {options.logprobs}")

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
        try:
            parameters.validate(self._limits.vocab_size, field="options")
        except InvalidFieldError as error:
            self.violations.append(error)
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
        self._refuse("options.drafter", f"expected one of {offered}, got {_quoted(name)}")

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

    def prompt(self) -> list[int]:
        """The prompt's ids, of whatever kind the input is; anything when it is refused."""
        kind = self._options.WhichOneof("input")
        if kind is None:
            self._refuse("options.input", "expected a prompt, prompt_token_ids or chat, got none")
            return []
        if kind == "prompt_token_ids":
            token_ids = self._given_ids()
        else:
            text = self._options.prompt if kind == "prompt" else self._rendered_chat()
            token_ids = None if text is None else self._encoded(text, f"options.{kind}")
        if token_ids is None:
            return []
        longest = self._limits.context_limit - 1
        if len(token_ids) > longest:
            field = GIVEN_IDS if kind == "prompt_token_ids" else f"options.{kind}"
            self._refuse(field, f"expected at most {longest} tokens, got {len(token_ids)}")
        return token_ids

    def _given_ids(self) -> list[int] | None:
        field, vocab_size = GIVEN_IDS, self._limits.vocab_size
        token_ids = list(self._options.prompt_token_ids.ids)
        if not token_ids:
            self._refuse(field, "expected at least one id, got none")
            return None
        for index, token_id in enumerate(token_ids):
            if token_id >= vocab_size:
                self._refuse(field, f"expected an id in [0, {vocab_size}), got {token_id}", index)
                return None
        return token_ids

    def _encoded(self, text: str, field: str) -> list[int] | None:
        size, most = len(text.encode()), self._limits.prompt_bytes
        if size > most:
            self._refuse(field, f"expected at most {most} bytes of text, got {size}")
            return None
        token_ids = self._tokenizer.encode(text)
        if not token_ids:
            self._refuse(field, "expected text that holds at least one token")
            return None
        return token_ids

    def _rendered_chat(self) -> str | None:
        messages = self._options.chat.messages
        if not messages:
            self._refuse("options.chat.messages", "expected at least one message, got none")
            return None
        unknown = [index for index, message in enumerate(messages) if message.role not in ROLES]
        for index in unknown:
            role = messages[index].role
            field = f"options.chat.messages[{index}].role"
            self._refuse(field, f"expected one of {', '.join(ROLES)}, got {_quoted(role)}")
        size, most = sum(len(message.content.encode()) for message in messages), self._limits.prompt_bytes
        if size > most:
            self._refuse("options.chat", f"expected at most {most} bytes of text, got {size}")
        if unknown or size > most:
            return None
        try:
            return self._tokenizer.render_chat([Message(message.role, message.content) for message in messages])
        except ChatTemplateError as error:
            self._refuse("options.chat", str(error)[:TEMPLATE_MESSAGE_CHARACTERS])
            return None

    def _refuse(self, field: str, reason: str, row: int | None = None) -> None:
        self.violations.append(InvalidFieldError(field, reason, row))


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= QUOTED_CHARACTERS else text[:QUOTED_CHARACTERS] + "...")


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
