"""The prompt of a request, a text, ids or a conversation, as the teacher's ids; the rules of these fields are here."""

from __future__ import annotations

from orchestrator.limits import Limits
from orchestrator.tokenizer import ChatTemplateError, Message, Tokenizer
from protos.errors import InvalidFieldError
from protos.v1 import generation_pb2

GIVEN_IDS = "options.prompt_token_ids.ids"
ROLES = ("system", "user", "assistant")
QUOTED_CHARACTERS = 40
TEMPLATE_MESSAGE_CHARACTERS = 300


def quoted(text: str) -> str:
    """What came, fit for a message: printable and short."""
    return ascii(text if len(text) <= QUOTED_CHARACTERS else text[:QUOTED_CHARACTERS] + "...")


class PromptReading:
    """The checks of one prompt.

    Args:
        options: whose input it is.
        limits: of the deployment.
        tokenizer: the teacher's.
        violations: to which everything that is wrong is added.
    """

    def __init__(
        self,
        options: generation_pb2.GenerationOptions,
        limits: Limits,
        tokenizer: Tokenizer,
        violations: list[InvalidFieldError],
    ) -> None:
        self._options = options
        self._limits = limits
        self._tokenizer = tokenizer
        self._violations = violations

    def token_ids(self) -> list[int]:
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
        token_ids = self._tokenizer.encode_prompt(text)
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
            self._refuse(field, f"expected one of {', '.join(ROLES)}, got {quoted(role)}")
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
        self._violations.append(InvalidFieldError(field, reason, row))
