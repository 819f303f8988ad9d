"""One session of the draft, seen from the client. Nothing that the draft does, or fails to do, holds a round up for
longer than its deadline. What it meets, it tells the breaker that all sessions share.

At most one question is open. A proposal that comes after its deadline is thrown away, and closes the question: from
then on the two sides agree again. Messages are queued and never block; what to do after a failure is decided elsewhere
(`orchestrator.drafting`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import grpc
import grpc.aio

from eagle_pangu.serving.logs import get_logger
from eagle_pangu.speculation.tree import TokenTree
from orchestrator.breaker import CircuitBreaker
from orchestrator.counters import PartTimes
from orchestrator.sessions import Call, Metadata, microseconds, new_epoch, say_goodbye
from protos.codec import decode_tree
from protos.errors import InvalidFieldError
from protos.v1 import draft_pb2, draft_pb2_grpc, model_pb2, teacher_pb2, tree_pb2

log = get_logger(__name__)


class Fallback(StrEnum):
    """Why a round that asked for a draft went on without one, as told in SpeculationStats."""

    DEADLINE = "deadline"
    """No proposal in time."""
    UNAVAILABLE = "unavailable"
    """No draft service, or its stream died."""
    REFUSED = "refused"
    """The draft service refused the session or the question."""
    INVALID_TREE = "invalid_tree"
    """The proposal broke a rule of token trees."""
    TEACHER_LOST = "teacher_lost"
    """The teacher was lost while it verified the draft's tree."""


class DraftError(Exception):
    """There is no proposal. reason: as told to the caller; the message is for the log."""

    def __init__(self, reason: Fallback, details: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}: {details}")


@dataclass(frozen=True)
class DraftOpening:
    """What a session opens with; fields as in OpenDraftSession.

    metadata: of the call. sends_features: features will be sent; a drafter that needs them is refused otherwise.
    """

    request_id: str
    teacher: model_pb2.ModelFingerprint
    prompt_token_ids: Sequence[int]
    drafter: str
    rows: int
    depth: int
    sends_features: bool
    metadata: Metadata = ()


class Question(NamedTuple):
    """What a proposal is asked for.

    round: ascending. committed_length: tokens before the root. appended: tokens not told yet, the root last.
    rows, depth: budget of the tree; at most the session's. features: to be read first.
    """

    round: int
    committed_length: int
    appended: Sequence[int]
    rows: int
    depth: int
    features: Sequence[tree_pb2.Features] = ()


class Proposal(NamedTuple):
    """A valid tree over the root asked for; times of the call."""

    tree: TokenTree
    times: PartTimes


class DraftSession:
    """One stream. Use it from one task; close it whatever happens.

    Attributes:
        opened: The draft's answer to the open; None until it came.
        answering: A question is open: its answer is late, or not due yet.
    """

    def __init__(
        self, stub: draft_pb2_grpc.DraftServiceAsyncStub, opening: DraftOpening, breaker: CircuitBreaker
    ) -> None:
        self.opened: draft_pb2.DraftSessionOpened | None = None
        self.answering = False
        self._opening = opening
        self._breaker = breaker
        self._epoch = new_epoch()
        self._vocab_size = opening.teacher.vocab_size
        self._asked_round = 0
        self._over: DraftError | None = None
        self._progress = asyncio.Event()  # something was read, whatever it was
        self._answer: draft_pb2.ProposeResponse | None = None
        self._outgoing: asyncio.Queue[draft_pb2.ProposeRequest | None] = asyncio.Queue()
        self._call: Call = stub.Propose(self._requests(), metadata=opening.metadata)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self._send_open()

    @property
    def over(self) -> DraftError | None:
        """Why the stream is dead; None while it lives."""
        return self._over

    async def wait_opened(self, seconds: float) -> draft_pb2.DraftSessionOpened:
        """The draft's answer to the open.

        Raises:
            DraftError: it did not come within that time, or the draft refused.
        """
        try:
            async with asyncio.timeout(seconds):
                while self.opened is None:
                    await self._next()
        except TimeoutError as error:
            self._breaker.missed(seconds, opened=False)
            raise DraftError(Fallback.DEADLINE, f"session not opened within {seconds:g} s") from error
        return self.opened

    def send_features(self, features: tree_pb2.Features) -> None:
        """Pass the teacher's features on."""
        self._send(draft_pb2.ProposeRequest(epoch=self._epoch, features=features))

    async def propose(self, question: Question, seconds: float) -> Proposal:
        """Ask for the tree of a round; not while `answering`.

        Args:
            question: told to the draft in any case, so its tokens and features must not be told again.
            seconds: longest wait.

        Raises:
            DraftError: there is no valid proposal in time.
        """
        assert not self.answering
        started = time.perf_counter()
        message = draft_pb2.ProposeTree(
            round=question.round,
            committed_length=question.committed_length,
            appended_token_ids=question.appended,
            budget=tree_pb2.TreeBudget(rows=question.rows, depth=question.depth),
            features=question.features,
        )
        self._asked_round = question.round
        self._answer = None
        self.answering = True
        self._send(draft_pb2.ProposeRequest(epoch=self._epoch, propose=message))
        try:
            async with asyncio.timeout(seconds):
                while (answer := self._answer) is None:
                    await self._next()
        except TimeoutError as error:
            self._breaker.missed(seconds, opened=self.opened is not None)
            raise DraftError(Fallback.DEADLINE, f"no proposal within {seconds:g} s") from error
        spent = microseconds(time.perf_counter() - started)
        if answer.WhichOneof("message") == "rejection":
            refusal: teacher_pb2.Rejection = answer.rejection
            raise DraftError(Fallback.REFUSED, f"{refusal.field}: {refusal.reason}")
        proposal = answer.proposal
        tree = self._checked(proposal.tree, question)
        return Proposal(tree, PartTimes(proposal.draft_us, max(0, spent - proposal.total_us)))

    def close(self, *, graceful: bool) -> None:
        """End the session. graceful: the request is done; otherwise cancel."""
        self._outgoing.put_nowait(None)
        if graceful and self._over is None and not self.answering:
            say_goodbye(self._call)  # the reader ends with the stream
        else:
            self._call.cancel()
            self._reader.cancel()

    def _checked(self, message: tree_pb2.TokenTree, question: Question) -> TokenTree:
        tree = TokenTree(*decode_tree(message))
        try:
            tree.validate(vocab_size=self._vocab_size, max_rows=question.rows, max_depth=question.depth)
            if tree.token_ids[0] != question.appended[-1]:
                raise InvalidFieldError(
                    "tree.token_ids", f"expected the root {question.appended[-1]}, got {tree.token_ids[0]}", 0
                )
        except InvalidFieldError as error:
            raise DraftError(Fallback.INVALID_TREE, str(error)) from error
        return tree

    async def _next(self) -> None:
        """Wait until something more was read."""
        if self._over is not None:
            raise self._over
        self._progress.clear()
        await self._progress.wait()
        if self._over is not None:
            raise self._over

    def _send(self, message: draft_pb2.ProposeRequest) -> None:
        if self._over is None:
            self._outgoing.put_nowait(message)

    def _send_open(self) -> None:
        opening = self._opening
        message = draft_pb2.OpenDraftSession(
            request_id=opening.request_id,
            teacher=opening.teacher,
            prompt_token_ids=opening.prompt_token_ids,
            drafter=opening.drafter,
            max_budget=tree_pb2.TreeBudget(rows=opening.rows, depth=opening.depth),
        )
        self._send(draft_pb2.ProposeRequest(epoch=self._epoch, open=message))

    async def _requests(self) -> AsyncIterator[draft_pb2.ProposeRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._receive(message)
                self._progress.set()
            self._end(DraftError(Fallback.UNAVAILABLE, "the draft ended the session"))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # any other status is of this session
                self._breaker.trip()
            self._end(_meaning(error))

    def _receive(self, message: draft_pb2.ProposeResponse) -> None:
        kind = message.WhichOneof("message")
        if message.epoch != self._epoch:
            log.debug("answer of another epoch ignored")
        elif kind == "opened":
            self.opened = message.opened
            if message.opened.needs_features and not self._opening.sends_features:
                self._end(DraftError(Fallback.REFUSED, "the drafter needs features, and the teacher sends none"))
        elif self._answers(message):
            self._answer = message
            self.answering = False
            self._breaker.answered()
        else:
            log.debug("answer of another round ignored", kind=kind)

    def _answers(self, message: draft_pb2.ProposeResponse) -> bool:
        """It belongs to the last question; a rejection without a round is of the features before it."""
        if message.HasField("proposal"):
            return message.proposal.round == self._asked_round
        return message.HasField("rejection") and message.rejection.round in (0, self._asked_round)

    def _end(self, error: DraftError) -> None:
        self._over = error
        self.answering = False
        self._progress.set()
        self._outgoing.put_nowait(None)


REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


def _meaning(error: grpc.aio.AioRpcError) -> DraftError:
    reason = Fallback.REFUSED if error.code() in REFUSALS else Fallback.UNAVAILABLE
    return DraftError(reason, f"{error.code().name}: {error.details()}")
