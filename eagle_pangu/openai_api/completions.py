"""Answers as (text) completions: one object, or chunks of a stream, which have the same form here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle_pangu.openai_api.answers import Delta, Envelope, Json, answers_of, ending, extras, usage
from eagle_pangu.openai_api.logprobs import CompletionLogprobs, Place, places_of, prompt_places
from eagle_pangu.openai_api.requests import CompletionRequest
from protos.v1 import generation_pb2, sampling_pb2

ID_PREFIX = "cmpl-"
OBJECT = "text_completion"


class CompletionForm:
    """The form of one request's answer.

    Args:
        request: as it came.
        envelope: of everything sent.
    """

    def __init__(self, request: CompletionRequest, envelope: Envelope) -> None:
        self._request = request
        self._envelope = envelope
        self._prompt: list[Place] = []
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self, response: generation_pb2.GenerateResponse) -> Json:
        """The response object."""
        self._read_prompt(response)
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": self._part(index, answer.logprobs),
                **ending(answer),
                "token_ids": list(answer.token_ids),
            }
            for index, answer in enumerate(answers_of(response))
        ]
        return self._envelope.around(OBJECT, choices=choices, usage=usage(response.usage), **extras(response))

    def chunks(self, message: Delta) -> Iterator[Json]:
        """Text and ids of one message, and the end of the choice where the message has it."""
        if not self._logprobs:  # the first message of the stream
            self._read_prompt(message)
        choice = {
            "index": message.index,
            "text": message.text,
            "logprobs": self._part(message.index, message.logprobs),
            "finish_reason": None,
            "token_ids": list(message.token_ids),
        }
        if message.finish_reason:
            choice.update(ending(message))
        yield self._envelope.around(OBJECT, choices=[choice], **extras(message))

    def usage_chunk(self, counted: generation_pb2.Usage) -> Json:
        """The last chunk, where asked for."""
        return self._envelope.around(OBJECT, choices=[], usage=usage(counted))

    def _read_prompt(self, message: generation_pb2.GenerateResponse | Delta) -> None:
        if self._request.echo and self._request.logprobs is not None:
            self._prompt = prompt_places(message.prompt_tokens, message.prompt_logprobs)

    def _part(self, index: int, entries: Sequence[sampling_pb2.TokenLogprobs]) -> Json | None:
        """Log-probabilities that follow those of the choice so far; its first part begins with the prompt's."""
        begun = index in self._logprobs
        logprobs = self._logprobs.setdefault(index, CompletionLogprobs())
        if self._request.logprobs is None:
            return None
        return logprobs.part([*(() if begun else self._prompt), *places_of(entries)])
