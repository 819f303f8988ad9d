"""The teacher as an answer sees it: one that answers, though the session behind it may have to be opened anew.

A lost session is opened again, elsewhere if need be, on the prompt and the answer so far. The prefill of the new
session decides the token that the lost round was to decide, so it stands for that round, with a tree of the root alone:
the tokens are the same, and so are the sums (DESIGN §10). While the process drains nobody waits for a teacher: one that
is there is taken, and without one the request ends. It knows nothing of drafts and stop rules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from eagle_pangu.serving.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.racing import finished_before
from eagle_pangu.speculation.tree import TokenTree
from orchestrator.counters import Batch, PartTimes
from orchestrator.deadline import Deadline
from orchestrator.sessions import microseconds
from orchestrator.teacher import FirstToken, TeacherOpening, TeacherSession
from orchestrator.teacher_errors import TeacherLostError
from protos.v1 import model_pb2, sampling_pb2, teacher_pb2_grpc

OPEN_ATTEMPTS = 2
"""For the first session of an answer; a caller without an answer can try again as well as we can."""
REOPEN_ATTEMPTS = 5
"""In all, for the rest of an answer."""
FIRST_BACKOFF_SECONDS = 0.05

log = get_logger(__name__)


class Decision(NamedTuple):
    """What one round decided.

    tree: the one that the teacher decided on; the root alone after a loss. accepted_rows, next_token_id, margins,
    logprobs, times, batch: as in `Verdict`. reopened: the session was lost in this round.
    """

    tree: TokenTree
    accepted_rows: list[int]
    next_token_id: int
    margins: list[float]
    logprobs: list[sampling_pb2.TokenLogprobs]
    times: PartTimes
    batch: Batch
    reopened: bool


class Teacher:
    """The sessions of one answer, one after the other.

    Args:
        stub: of the teacher service.
        opening: of the first session.
        deadline: of the request.
        draining: set once the process drains.
    """

    def __init__(
        self,
        stub: teacher_pb2_grpc.TeacherServiceAsyncStub,
        opening: TeacherOpening,
        deadline: Deadline,
        draining: asyncio.Event,
    ) -> None:
        self._stub = stub
        self._opening = opening
        self._deadline = deadline
        self._draining = draining
        self._session: TeacherSession | None = None
        self._attempts_left = REOPEN_ATTEMPTS

    @property
    def epoch(self) -> int:
        """Of the current session; 0 without one."""
        return self._session.epoch if self._session else 0

    @property
    def numerics(self) -> model_pb2.TeacherNumerics:
        """How the current teacher computes."""
        return self._session.numerics if self._session else model_pb2.TeacherNumerics()

    @property
    def advised_rows(self) -> int | None:
        """Drafted rows that pay in the next round while the teacher is shared; None: as many as are asked for."""
        return self._session.advised_rows if self._session else None

    async def open(self, *, want_features: bool) -> FirstToken:
        """The first session, and the first answer token.

        Args:
            want_features: of this and every later session.

        Raises:
            UnavailableError: no teacher.
            ResourceExhaustedError: no slot.
            DeadlineExceededError: the request's time is over.
        """
        self._opening = replace(self._opening, want_features=want_features)
        reason = ""
        for attempt in range(OPEN_ATTEMPTS):
            await _pause_before(attempt)
            try:
                return await self._open(self._opening, patient=False)
            except TeacherLostError as error:
                reason = error.reason
                log.warning("teacher session not opened", reason=str(error))
        raise UnavailableError(f"no teacher: {reason}")

    async def verify(self, tree: TokenTree, commit: int, answer: Sequence[int]) -> Decision:
        """One round, whatever becomes of the session.

        Args:
            tree: to verify.
            commit: as in `TeacherSession.verify`.
            answer: tokens decided so far; the last one is the root.

        Raises:
            UnavailableError: the teacher is lost, and no other one took its place in time.
            ResourceExhaustedError: the others are full.
            DeadlineExceededError: the request's time is over.
        """
        assert self._session is not None
        started = time.perf_counter()
        try:
            return Decision(tree, *await self._session.verify(tree, commit), reopened=False)
        except TeacherLostError as error:
            log.warning("teacher lost", reason=str(error), answer_tokens=len(answer))
            first = await self._reopen(answer, error.reason)
        spent = microseconds(time.perf_counter() - started)
        times = first.times._replace(wire_us=max(0, spent - sum(first.times._replace(wire_us=0))))
        root = TokenTree.root_only(answer[-1])
        return Decision(root, [], first.token_id, [first.margin], first.logprobs, times, first.batch, reopened=True)

    def close(self, *, graceful: bool) -> None:
        """End the current session."""
        if self._session is not None:
            self._session.close(graceful=graceful)

    async def _reopen(self, answer: Sequence[int], reason: str) -> FirstToken:
        opening = replace(
            self._opening,
            prompt_token_ids=[*self._opening.prompt_token_ids, *answer],
            answer_start=len(self._opening.prompt_token_ids),
            max_new_tokens=self._opening.max_new_tokens - len(answer),
            prompt_logprobs=None,  # they were told with the first token
        )
        patience = self._opening.answer_seconds
        full: ResourceExhaustedError | None = None
        try:
            async with asyncio.timeout(patience):
                for attempt in range(self._attempts_left):
                    await _pause_before(attempt)
                    self._attempts_left -= 1
                    try:
                        first = await self._open(opening, patient=not self._draining.is_set())
                    except TeacherLostError as error:
                        reason, full, logged = error.reason, None, str(error)
                    except ResourceExhaustedError as error:
                        reason, full, logged = str(error), error, str(error)
                    else:
                        log.info("teacher session reopened", epoch=self.epoch, answer_tokens=len(answer))
                        return first
                    log.warning("teacher session not reopened", reason=logged, attempts_left=self._attempts_left)
        except TimeoutError:
            reason = f"{reason}; no other one within {patience:g} s"
        raise full or UnavailableError(f"the teacher is lost: {reason}")

    async def _open(self, opening: TeacherOpening, *, patient: bool) -> FirstToken:
        """One attempt. patient: wait for a teacher where there is none, until a drain begins."""
        self.close(graceful=False)
        timeout = self._deadline.remaining()
        if timeout is not None and timeout <= 0:
            raise DeadlineExceededError("the request's deadline passed")
        session = self._session = TeacherSession(self._stub, opening, timeout=timeout, wait_for_ready=patient)
        if patient and not await finished_before(session.connected(), self._draining):
            raise TeacherLostError("no other one before the drain")
        return await session.prefill()


async def _pause_before(attempt: int) -> None:
    """Nothing before the first attempt, then twice as long each time."""
    if attempt:
        await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
