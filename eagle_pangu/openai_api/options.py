"""From a request to GenerationOptions, and from the names of its fields back to those of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eagle_pangu.openai_api.requests import ChatRequest, CompletionRequest, GenerationFields
from protos.v1 import generation_pb2

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's, where a request names none: greedy decoding has to be asked for with 0."""

SAME_SCALARS = (
    *("max_tokens", "top_p", "n", "seed", "frequency_penalty", "presence_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "include_stop"),
    *("drafter", "priority", "stream_tokens"),
)
"""Fields that have one name and one meaning on both sides; null is absent."""
SAME_LISTS = ("stop", "stop_token_ids", "allowed_token_ids")
REQUEST_ID_HEADER = "x-request-id"


@dataclass(frozen=True)
class Question:
    """What the orchestrator is asked.

    options: as it goes out. renamed: beginnings of field paths in `options` -> HTTP names, longer ones first; other
    names are the same.
    """

    options: generation_pb2.GenerationOptions
    renamed: Mapping[str, str]

    def http_field(self, path: str) -> str:
        """The HTTP name of a field that the orchestrator names, as in "options.chat.messages[0].role"."""
        path = path.removeprefix("options.")
        for ours, theirs in self.renamed.items():
            if path.startswith(ours):
                return theirs + path.removeprefix(ours)
        return path


def completion_question(request: CompletionRequest, request_id: str) -> Question:
    """Of POST /v1/completions. With echo, log-probabilities are of the prompt too."""
    options = _options(request, request_id)
    if isinstance(request.prompt, str):
        options.prompt = request.prompt
    else:
        options.prompt_token_ids.ids.extend(request.prompt)
    options.echo = bool(request.echo)
    if request.logprobs is not None:
        options.logprobs = request.logprobs
        if request.echo:
            options.prompt_logprobs = request.logprobs
    renamed = {"prompt_token_ids.ids": "prompt", "input": "prompt", "prompt_logprobs": "logprobs"}
    return Question(options, {**renamed, "request_id": REQUEST_ID_HEADER})


def chat_question(request: ChatRequest, request_id: str) -> Question:
    """Of POST /v1/chat/completions."""
    options = _options(request, request_id)
    for message in request.messages:
        options.chat.messages.add(role=message.role, content=message.content)
    renamed = {"chat.messages": "messages", "chat": "messages", "input": "messages", "logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        options.max_tokens = request.max_completion_tokens
        renamed["max_tokens"] = "max_completion_tokens"
    if request.logprobs:
        options.logprobs = request.top_logprobs or 0
    return Question(options, {**renamed, "request_id": REQUEST_ID_HEADER})


def _options(request: GenerationFields, request_id: str) -> generation_pb2.GenerationOptions:
    """Everything but the input and the log-probabilities."""
    options = generation_pb2.GenerationOptions(request_id=request_id)
    options.temperature = DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
    for name in SAME_SCALARS:
        value = getattr(request, name)
        if value is not None:
            setattr(options, name, value)
    for name in SAME_LISTS:
        getattr(options, name).extend(getattr(request, name) or ())
    for token_ids in request.bad_words or ():
        options.bad_words.add(token_ids=token_ids)
    for token_id, bias in (request.logit_bias or {}).items():
        options.logit_bias[int(token_id)] = bias
    return options
