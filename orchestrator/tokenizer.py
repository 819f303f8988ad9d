"""Text to the teacher's ids and back, without torch or transformers.

Chat templates are rendered in the sandbox and with the names that transformers gives them, so that a template written
for it yields the same prompt here. What to do with an id (stop, stream, count) is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from orchestrator.token_bytes import TokenBytes, with_marks
from protos.v1 import teacher_pb2


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered; the message says why."""


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


class Tokenizer:
    """The teacher's tokenizer.

    Args:
        tokenizer_json: In the format of the `tokenizers` library, UTF-8.
        chat_template: Jinja; empty when the model has none.
        special_tokens: What the template may use by name: bos_token, eos_token, ...
        adds_bos: Prompts begin with bos_token.

    Attributes:
        special_ids: Of the tokens without text.
        token_bytes: The bytes of each id's own text.

    Raises:
        ValueError: the tokenizer cannot be read, the template is not Jinja, or there is no bos_token to begin with.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        chat_template: str = "",
        special_tokens: dict[str, str] | None = None,
        *,
        adds_bos: bool = False,
    ) -> None:
        try:
            self._tokenizer = FastTokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer_json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = special_tokens or {}
        try:
            self._template = _environment().from_string(chat_template) if chat_template else None
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template: {error}") from error
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self._decoder: Any = self._tokenizer.decoder
        self.token_bytes = TokenBytes(self._tokenizer)
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._beginning = [self._bos_id()] if adds_bos else []

    @classmethod
    def from_message(cls, message: teacher_pb2.GetTokenizerResponse) -> Tokenizer:
        """The tokenizer that a teacher offers."""
        return cls(
            message.tokenizer_json,
            message.chat_template,
            dict(message.special_tokens),
            adds_bos=message.adds_bos,
        )

    @property
    def has_chat_template(self) -> bool:
        """Conversations can be rendered."""
        return self._template is not None

    @cached_property
    def size(self) -> int:
        """Ids in use: one more than the largest."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of raw text; special tokens written out in it are read as such, none are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt's text: those of the raw text, after the BOS where the model wants one and none is there."""
        ids = self.encode(text)
        begun = not ids or ids[:1] == self._beginning
        return ids if begun else [*self._beginning, *ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out. A character of which bytes are missing becomes U+FFFD."""
        text: str
        if self.token_bytes.byte_fallback:
            tokens = (self.token(token_id) for token_id in token_ids if token_id not in self.special_ids)
            text = self._decoder.decode(list(with_marks(token for token in tokens if token is not None)))
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def token(self, token_id: int) -> str | None:
        """An id as the vocabulary writes it; None for an id without an entry."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def render_chat(self, messages: Sequence[Message]) -> str:
        """A conversation as the prompt that asks for the assistant's next message; encode it as any other prompt.

        Raises:
            ChatTemplateError: the model has no template, or the template refuses the conversation.
        """
        if self._template is None:
            raise ChatTemplateError("the model has no chat template; send a prompt or token ids")
        try:
            return self._template.render(
                messages=[message._asdict() for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(f"the chat template refuses the conversation: {error}") from error

    def _bos_id(self) -> int:
        token = self._special_tokens.get("bos_token")
        bos: int | None = None if token is None else self._tokenizer.token_to_id(token)
        if bos is None:
            raise ValueError(f"special_tokens: expected a bos_token of the vocabulary, got {token!r}")
        return bos


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body in place of the block (jinja2's hook)."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    return datetime.now().strftime(format)  # noqa: DTZ005 - local time, as templates expect
