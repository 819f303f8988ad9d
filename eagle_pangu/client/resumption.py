"""A stream that broke is asked again whole; of the repetition the caller sees only what is new.

That is sound because the same request, a seed included, gives the same answers. It is checked all the same: what comes
again is compared with what was delivered. Messages in, messages out; does no I/O and never waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.v1 import generation_pb2
from protos.v1.generation_pb2 import GenerateStreamRequest, GenerateStreamResponse

SEED_BITS = 64
THE_END = "the end"


class DivergedError(Exception):
    """The repetition of a broken stream differs from what was delivered of it; nothing more was delivered.

    Another model answered, or numerics are `free`. What was delivered is a correct beginning of one answer, and cannot
    be continued.

    Attributes:
        index: Of the answer (n > 1).
        field: That differs: "token_ids" or "text" of the answer, or "prompt_token_ids".
        position: Of the first difference, in tokens or in characters from the beginning of `field`.
    """

    def __init__(self, index: int, field: str, position: int, delivered: str, repeated: str) -> None:
        self.index = index
        self.field = field
        self.position = position
        super().__init__(
            f"answer {index}, {field}[{position}]: expected {delivered} as delivered before the stream broke, "
            f"got {repeated}"
        )


def repeatable(options: generation_pb2.GenerationOptions) -> GenerateStreamRequest:
    """The request of every attempt: it names a seed where it samples. `options` stays as it is."""
    request = GenerateStreamRequest(options=options)
    if options.temperature > 0 and not options.HasField("seed"):
        request.options.seed = secrets.randbits(SEED_BITS)
    return request


class Delivery:
    """What the caller has of one stream's answers, over all attempts. Call `begin_attempt` before each of them."""

    def __init__(self) -> None:
        self._attempts = 0
        self._at_beginning = True
        self._answers: dict[int, _Answer] = {}
        self._prompt: list[int] | None = None
        self._complete = False

    @property
    def complete(self) -> bool:
        """Whether the last message of the stream was delivered; only the status can be missing then."""
        return self._complete

    def begin_attempt(self) -> None:
        """The stream starts again from its beginning."""
        self._attempts += 1
        self._at_beginning = True
        for answer in self._answers.values():
            answer.ids_read = answer.characters_read = 0

    def news_of(self, message: GenerateStreamResponse) -> GenerateStreamResponse | None:
        """The part of the message that is to be delivered; None: nothing of it.

        Raises:
            DivergedError: The rest of it is not what was delivered.
        """
        news = GenerateStreamResponse()
        news.CopyFrom(message)
        answer = self._answers.setdefault(message.index, _Answer(message.index))
        self._cut_prompt(news)
        answer.cut(news)
        self._complete = self._complete or news.HasField("usage")
        return news if self._attempts == 1 or _says_something(news) else None

    def end_attempt(self) -> None:
        """The stream ended with OK.

        Raises:
            DivergedError: It is shorter than what was delivered.
        """
        for answer in self._answers.values():
            answer.check_end()

    def _cut_prompt(self, news: GenerateStreamResponse) -> None:
        """Prompt fields are in the first message of every attempt, and are delivered with the first one of all."""
        if not self._at_beginning:
            return
        self._at_beginning = False
        ids = list(news.prompt_token_ids)
        if self._prompt is None:
            self._prompt = ids
            return
        known = _known(self._prompt, 0, ids, news.index, "prompt_token_ids")
        if len(ids) != len(self._prompt):
            had, got = (repr(those[known]) if known < len(those) else THE_END for those in (self._prompt, ids))
            raise DivergedError(news.index, "prompt_token_ids", known, had, got)
        news.ClearField("prompt_token_ids")
        news.ClearField("prompt_tokens")
        news.ClearField("prompt_logprobs")


@dataclass
class _Answer:
    """One of n answers: what was delivered of it, and how much of that the current attempt has repeated."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    over: bool = False
    ids_read: int = 0
    characters_read: int = 0

    def cut(self, news: GenerateStreamResponse) -> None:
        """Take out of the message what was delivered, and note the rest as delivered."""
        ids, text = list(news.token_ids), news.text
        known_ids = self._known(self.token_ids, self.ids_read, ids, "token_ids")
        known_characters = self._known(self.text, self.characters_read, text, "text")
        self.ids_read += len(ids)
        self.characters_read += len(text)
        ends = news.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED
        if ends:
            self.check_end()
        self.token_ids += ids[known_ids:]
        self.text += text[known_characters:]
        for per_token in (news.token_ids, news.margins, news.logprobs):
            del per_token[:known_ids]
        news.text = text[known_characters:]
        if self.over:
            # The answers may end in another order this time; then the end of the stream comes with one that is over.
            for name in ("finish_reason", "matched_stop", "speculation", "seed"):
                news.ClearField(name)
        self.over = self.over or ends

    def check_end(self) -> None:
        """Raise DivergedError where the attempt ends before what was delivered does."""
        for name, delivered, read in (
            ("token_ids", self.token_ids, self.ids_read),
            ("text", self.text, self.characters_read),
        ):
            if read < len(delivered):
                raise DivergedError(self.index, name, read, repr(delivered[read]), THE_END)

    def _known(self, delivered: Sequence[Any], start: int, piece: Sequence[Any], name: str) -> int:
        known = _known(delivered, start, piece, self.index, name)
        if self.over and known < len(piece):
            raise DivergedError(self.index, name, start + known, THE_END, repr(piece[known]))
        return known


def _known(delivered: Sequence[Any], start: int, piece: Sequence[Any], index: int, name: str) -> int:
    """How many first items of `piece`, which begins at item `start`, were delivered; all of them must be equal."""
    known = delivered[start : start + len(piece)]
    for position, (had, got) in enumerate(zip(known, piece, strict=False), start):
        if had != got:
            raise DivergedError(index, name, position, repr(had), repr(got))
    return len(known)


def _says_something(news: GenerateStreamResponse) -> bool:
    return bool(news.token_ids or news.text or news.finish_reason or news.HasField("usage"))
