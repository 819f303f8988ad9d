"""The two requests as OpenAI names their fields, with our own beside them; what is not listed here is refused.

Types and forms are checked here, in strict mode: no "5" for 5. Ranges are the orchestrator's to check, so that they
stand in one place. A field that is null counts as left out, as with OpenAI.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from eagle_pangu.openai_api.errors import ApiError, refusal_of
from eagle_pangu.openai_api.fields import Content, Count, Number, Priority, Prompt, Seed, Stop, TokenIdText

AnyFields = TypeVar("AnyFields", bound="GenerationFields")


class Fields(BaseModel):
    """An object of a request: strict types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Fields):
    """include_usage: a last chunk tells the usage of the whole request."""

    include_usage: bool | None = None


class GenerationFields(Fields):
    """What both requests have: OpenAI's fields, then our extensions, which mean what they mean in GenerationOptions.

    `temperature` left out is 1, as OpenAI documents it, and not greedy, as in GenerationOptions. `user` is logged.
    """

    model: str
    max_tokens: Count | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: Count | None = None
    stop: Stop = []
    seed: Seed | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: dict[TokenIdText, Number] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: Count | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    bad_words: list[list[Count]] | None = None
    allowed_token_ids: list[Count] | None = None
    include_stop: bool | None = None
    drafter: str | None = None
    priority: Priority | None = None
    stream_tokens: bool | None = None

    @property
    def wants_usage(self) -> bool:
        """A stream shall end with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_are_of_a_stream(self) -> Self:
        for name in ("stream_options", "stream_tokens"):
            if getattr(self, name) and not self.stream:
                raise _refused(name, "expected only together with stream: true")
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions. logprobs: so many of the best tokens at each place, those decided besides."""

    prompt: Prompt
    logprobs: Count | None = None
    echo: bool | None = None


class ChatMessage(Fields):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: Content


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions. max_completion_tokens is the newer name of max_tokens."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @model_validator(mode="after")
    def _one_name_for_the_most_tokens(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise _refused("max_tokens", "expected it or max_completion_tokens, got both")
        return self

    @model_validator(mode="after")
    def _top_logprobs_are_of_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _refused("top_logprobs", "expected only together with logprobs: true")
        return self


def read(kind: type[AnyFields], body: bytes) -> AnyFields:
    """The request in a body of JSON.

    Raises:
        ApiError: 400 that names every field at fault.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise refusal_of(error) from None


def require_model(asked: str, served: str) -> None:
    """Raise the 404 of a model that is not served here."""
    if asked != served:
        reason = f"the model {asked!r} does not exist here; expected {served!r}"
        raise ApiError(404, reason, param="model", code="model_not_found")


def _refused(field: str, reason: str) -> PydanticCustomError:
    """A rule over several fields; `refusal_of` reads the field back from the context."""
    return PydanticCustomError("together", "{reason}", {"reason": reason, "field": field})
