"""The draft as a request sees it: a tree for every round, the root alone where the draft has none to give.

It never fails and never decides: a draft that is absent, slow, wrong or dead costs the rounds without it, told with a
reason. After a rest it is tried again, in the same request, on the answer so far. A round for which no row pays does
without a question; the next one tells the draft what it missed. It knows nothing of the teacher but the features and
the advice passed through.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import grpc.aio

from eagle_pangu.serving.logs import get_logger
from eagle_pangu.speculation.tree import TokenTree
from orchestrator.breaker import CircuitBreaker
from orchestrator.counters import PartTimes
from orchestrator.draft import DraftError, DraftOpening, DraftSession, Fallback, Question
from orchestrator.requests import Request
from orchestrator.sessions import metadata_of, microseconds
from protos.v1 import draft_pb2, draft_pb2_grpc, model_pb2, tree_pb2

PROBE_SECONDS = 3.0
"""Longer than the channel's longest pause between two attempts to connect."""

MOST_WAITING_BYTES = 2**18
"""Of features that wait for a question, far below the largest message; past it they go without one."""

log = get_logger(__name__)


class Learned(NamedTuple):
    """What the draft service made of a drafter's name: the drafter chosen, and whether it reads features."""

    drafter: str
    needs_features: bool


class DraftService:
    """What all requests share about the draft service.

    Args:
        stub: of the service.
        teacher: that will verify.
        deadline_seconds: longest wait for one proposal.
        rest_seconds: after a failure, time without new use; 0: none.

    Attributes:
        breaker: told by the sessions, asked by the requests.
        learned: by the name that a request gave.
    """

    def __init__(
        self,
        stub: draft_pb2_grpc.DraftServiceAsyncStub,
        teacher: model_pb2.ModelFingerprint,
        *,
        deadline_seconds: float,
        rest_seconds: float,
    ) -> None:
        self.stub = stub
        self.teacher = teacher
        self.deadline_seconds = deadline_seconds
        self.rest_seconds = rest_seconds
        self.breaker = CircuitBreaker(rest_seconds, self._is_back)
        self.learned: dict[str, Learned] = {}

    async def _is_back(self) -> bool:
        request = draft_pb2.GetDraftersRequest()
        try:
            await self.stub.GetDrafters(request, timeout=PROBE_SECONDS, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            log.warning("draft still away", reason=f"{error.code().name}: {error.details()}")
            return False
        return True


class Drafted(NamedTuple):
    """The tree of a round.

    fallback: why it is the root alone although a draft was asked for; None otherwise. load_limited: the draft was asked
    for fewer rows than the request was, or not asked, since more do not pay.
    """

    tree: TokenTree
    fallback: Fallback | None = None
    times: PartTimes = PartTimes()
    load_limited: bool = False


class Drafting:
    """The draft sessions of one request, one after the other.

    Args:
        service: None: teacher-only.
        request: what is asked for.
    """

    def __init__(self, service: DraftService | None, request: Request) -> None:
        self._service = service if request.wants_draft else None
        self._request = request
        self._session: DraftSession | None = None
        self._told = 0  # answer tokens that the session knows
        self._sends_features = False
        self._features: list[tree_pb2.Features] = []  # of answer tokens, to be told with the next question
        self._features_end = 0
        self._resting_until = -float("inf")
        self._reason = Fallback.UNAVAILABLE  # of the last failure
        self._misses = 0  # deadlines missed in a row
        self.drafter = "none"

    async def start(self) -> bool:
        """Open the first session; returns whether the drafter wants the teacher's features."""
        service = self._service
        if service is None:
            return False
        learned = service.learned.get(self._request.drafter)
        if learned is not None:
            self.drafter = learned.drafter
        if service.breaker.is_open:
            return False
        self._sends_features = learned is None or learned.needs_features
        session = self._open(service, [])
        if learned is None:
            try:
                await session.wait_opened(service.deadline_seconds)
            except DraftError as error:
                self._sends_features = False
                self._failed(service, error)
                return False
            self._learn(service, session)
            learned = service.learned[self._request.drafter]
        self.drafter, self._sends_features = learned
        return self._sends_features

    async def propose(self, number: int, answer: Sequence[int], depth: int, advised_rows: int | None = None) -> Drafted:
        """The tree of a round.

        Args:
            number: of the round.
            answer: tokens decided so far; the last one is the root.
            depth: deepest row that can still be of use.
            advised_rows: most rows that pay; None: all that the request asks for.
        """
        service, root = self._service, TokenTree.root_only(answer[-1])
        depth = min(depth, self._request.depth)
        if service is None or depth <= 0 or self._past_context(len(answer)):
            return Drafted(root)
        rows = self._request.rows
        if advised_rows is not None:
            rows = min(rows, advised_rows)
        load_limited = rows < self._request.rows
        if load_limited and rows == 0:
            return Drafted(root, load_limited=True)
        self._drop_lost_session()
        resting = self._why_resting(service)
        if resting is not None:
            return Drafted(root, resting)
        started = time.perf_counter()
        session = self._session or self._open(service, answer[:-1])
        length = len(self._request.prompt_token_ids) + len(answer)
        question = Question(number, length - 1, answer[self._told :], rows, depth, features=self._features)
        self._told, self._features = len(answer), []
        try:
            proposal = await session.propose(question, service.deadline_seconds)
        except DraftError as error:
            self._failed(service, error)
            spent = microseconds(time.perf_counter() - started)
            return Drafted(root, error.reason, PartTimes(wire_us=spent))
        finally:
            self._learn(service, session)
        self._misses = 0
        return Drafted(proposal.tree, None, proposal.times, load_limited)

    def send_features(self, features: tree_pb2.Features) -> None:
        """Pass features on; those that the draft has already (a reopened teacher sends them again) are dropped.

        Those of the prompt go at once, so that the draft reads them while the teacher does; those of a verdict, a
        moment before the next question, go with it: a message less in every round. Where no question comes for many
        rounds, they go without.
        """
        end = features.start + features.count
        if self._session is None or not self._sends_features or end <= self._features_end:
            return
        self._features_end = end
        if features.start < len(self._request.prompt_token_ids):
            self._session.send_features(features)
        else:
            self._features.append(features)
            if sum(len(each.data) for each in self._features) > MOST_WAITING_BYTES:
                for each in self._features:
                    self._session.send_features(each)
                self._features = []

    def close(self, *, graceful: bool) -> None:
        """End the current session. graceful: the request is done; otherwise cancel."""
        if self._session is not None:
            self._session.close(graceful=graceful)
            self._session = None

    def _open(self, service: DraftService, answer: Sequence[int]) -> DraftSession:
        request = self._request
        opening = DraftOpening(
            request_id=request.request_id,
            teacher=service.teacher,
            prompt_token_ids=[*request.prompt_token_ids, *answer],
            drafter=request.drafter,
            rows=request.rows,
            depth=request.depth,
            sends_features=self._sends_features,
            metadata=metadata_of(request.request_id, request.traceparent),
        )
        self._session = DraftSession(service.stub, opening, service.breaker)
        self._told = len(answer)
        return self._session

    def _past_context(self, answer_tokens: int) -> bool:
        opened = self._session.opened if self._session else None
        limit = opened.context_limit if opened else 0
        return limit > 0 and len(self._request.prompt_token_ids) + answer_tokens > limit

    def _drop_lost_session(self) -> None:
        """One that died while it was not asked tells nothing of the draft as it is now; a refused one does."""
        over = self._session.over if self._session else None
        if over is not None and over.reason is Fallback.UNAVAILABLE:
            log.warning("draft session lost", reason=str(over))
            self._reason = over.reason
            self.close(graceful=False)

    def _why_resting(self, service: DraftService) -> Fallback | None:
        """Why the draft is not to be asked now; None: it is."""
        if time.monotonic() < self._resting_until:
            return self._reason
        if self._session is not None and self._session.answering:
            return Fallback.DEADLINE
        if service.breaker.is_silent or (self._session is None and service.breaker.is_open):
            return Fallback.UNAVAILABLE
        # A drafter that reads features cannot start in the middle: those of the earlier tokens are gone.
        return self._reason if self._session is None and self._sends_features else None

    def _failed(self, service: DraftService, error: DraftError) -> None:
        log.warning("round without a draft", reason=str(error))
        if error.reason is Fallback.INVALID_TREE:
            return
        session, self._reason = self._session, error.reason
        if error.reason is Fallback.DEADLINE and session is not None and session.opened is not None:
            # The late proposal, once it comes, shows that the draft is alive; a draft that is always late gets a rest.
            self._misses += 1
            if self._misses == 1:
                return
        else:
            self.close(graceful=False)
        self._resting_until = time.monotonic() + service.rest_seconds

    def _learn(self, service: DraftService, session: DraftSession) -> None:
        if session.opened is not None:
            self.drafter = session.opened.drafter
            service.learned[self._request.drafter] = Learned(self.drafter, session.opened.needs_features)
