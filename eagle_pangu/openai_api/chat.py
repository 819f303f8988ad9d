"""Answers as chat completions: one object, or chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle_pangu.openai_api.answers import Delta, Envelope, Json, answers_of, ending, extras, usage
from eagle_pangu.openai_api.logprobs import chat_logprobs, places_of
from eagle_pangu.openai_api.requests import ChatRequest
from protos.v1 import generation_pb2

ID_PREFIX = "chatcmpl-"
CHUNK = "chat.completion.chunk"


class ChatForm:
    """The form of one request's answer.

    Args:
        request: as it came.
        envelope: of everything sent.
    """

    def __init__(self, request: ChatRequest, envelope: Envelope) -> None:
        self._with_logprobs = bool(request.logprobs)
        self._envelope = envelope
        self._begun: set[int] = set()

    def whole(self, response: generation_pb2.GenerateResponse) -> Json:
        """The response object."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": chat_logprobs(places_of(answer.logprobs)) if self._with_logprobs else None,
                **ending(answer),
                "token_ids": list(answer.token_ids),
            }
            for index, answer in enumerate(answers_of(response))
        ]
        return self._envelope.around(
            "chat.completion", choices=choices, usage=usage(response.usage), **extras(response)
        )

    def chunks(self, message: Delta) -> Iterator[Json]:
        """The role at the start of each choice, then its text and ids, then its end."""
        if message.index not in self._begun:
            self._begun.add(message.index)
            yield self._chunk(message, {"role": "assistant", "content": "", "refusal": None})
        if message.text or message.token_ids:
            logprobs = chat_logprobs(places_of(message.logprobs)) if self._with_logprobs else None
            yield self._chunk(message, {"content": message.text}, logprobs, token_ids=list(message.token_ids))
        if message.finish_reason:
            yield {**self._chunk(message, {}, **ending(message)), **extras(message)}

    def usage_chunk(self, counted: generation_pb2.Usage) -> Json:
        """The last chunk, where asked for."""
        return self._envelope.around(CHUNK, choices=[], usage=usage(counted))

    def _chunk(self, message: Delta, delta: Json, logprobs: Json | None = None, **more: Any) -> Json:
        choice = {"index": message.index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **more}
        return self._envelope.around(CHUNK, choices=[choice])
