"""One answer from start to end: makes its parts, runs its rounds, and frees everything however it ends.

It knows neither messages nor gRPC contexts nor the request's other answers; the steps themselves are
`orchestrator.rounds`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from eagle_pangu.serving.errors import ServiceError
from eagle_pangu.serving.logs import get_logger
from orchestrator.counters import Counters
from orchestrator.deadline import Deadline
from orchestrator.detokenizer import Detokenizer
from orchestrator.drafters import Drafters
from orchestrator.drafting import Drafting, DraftService
from orchestrator.failover import Teacher
from orchestrator.limits import Limits
from orchestrator.model import ServedModel
from orchestrator.requests import Request
from orchestrator.rounds import Emission, Rounds
from orchestrator.sessions import metadata_of
from orchestrator.stops import End, StopRules
from orchestrator.teacher import TeacherOpening
from orchestrator.trace import AnswerTrace, TraceFile
from protos.v1 import model_pb2, teacher_pb2_grpc

log = get_logger(__name__)


@dataclass(frozen=True)
class Services:
    """What every request of the process works with.

    limits: what they may ask; `default_drafter` left empty. drafters: on offer. draft: None when there is no draft
    service. answer_seconds: longest wait for one answer of the teacher. draining: set once the process drains.
    """

    model: ServedModel
    limits: Limits
    drafters: Drafters
    teacher: teacher_pb2_grpc.TeacherServiceAsyncStub
    draft: DraftService | None
    trace: TraceFile | None
    answer_seconds: float
    draining: asyncio.Event


class Generation:
    """One answer to a request.

    Args:
        request: what this answer asks for.
        services: to ask it of.
        deadline: of the request.
        index: of the answer among those to the request.

    Attributes:
        answer: Tokens emitted so far.
        counters: True at any moment.
        numerics: How the teacher computes; known once the first token is.
    """

    def __init__(self, request: Request, services: Services, deadline: Deadline, index: int) -> None:
        self.request = request
        self._services = services
        self._drafting = Drafting(services.draft, request)
        self._teacher = Teacher(services.teacher, self._opening(), deadline, services.draining)
        self._index = index
        self._trace = AnswerTrace(services.trace, request, index)
        rules = StopRules(
            Detokenizer(services.model.tokenizer),
            end_token_ids=request.sampling.end_token_ids,
            max_tokens=request.max_tokens,
            stop=request.stop,
            include_stop=request.include_stop,
        )
        self._rounds = Rounds(len(request.prompt_token_ids), self._teacher, self._drafting, rules, self._trace)

    @property
    def answer(self) -> list[int]:
        """See the class."""
        return self._rounds.answer

    @property
    def counters(self) -> Counters:
        """See the class."""
        return self._rounds.counters

    @property
    def numerics(self) -> model_pb2.TeacherNumerics:
        """See the class."""
        return self._teacher.numerics

    async def run(self) -> AsyncGenerator[Emission]:
        """The emissions of `Rounds.run`, with the prompt's text before the first one's where it is echoed.

        Both sessions are over before the last of them.

        Raises:
            ServiceError: the teacher cannot go on, for the reasons that `Teacher` gives.
        """
        started = time.monotonic()
        end: End | None = None
        before = self.request.echo or ""
        status = "CANCELLED"  # the caller went away, unless something else is found below
        try:
            async with aclosing(self._rounds.run()) as emissions:
                async for emission in emissions:
                    end = emission.end
                    if end is not None:
                        status = "OK"
                        self._close(graceful=True)
                    if before:
                        emission = emission._replace(pieces=[before + emission.pieces[0], *emission.pieces[1:]])
                        before = ""
                    yield emission
        except ServiceError as error:
            status = error.code.name
            raise
        except Exception:
            status = "INTERNAL"
            raise
        finally:
            if end is None:
                self._close(graceful=False)
            self._trace.end(status, end.finish_reason if end else None, self.answer, self.counters)
            log.info(
                "answer ended",
                answer=self._index,
                status=status,
                prompt_tokens=len(self.request.prompt_token_ids),
                answer_tokens=len(self.answer),
                rounds=self.counters.rounds,
                drafter=self.counters.drafter,
                fallback_reasons=self.counters.fallback_reasons,
                seconds=round(time.monotonic() - started, 4),
            )

    def _opening(self) -> TeacherOpening:
        request, drafts = self.request, self.request.wants_draft
        return TeacherOpening(
            request_id=request.request_id,
            fingerprint=self._services.model.fingerprint,
            prompt_token_ids=request.prompt_token_ids,
            max_new_tokens=request.max_tokens,
            rows=request.rows if drafts else 0,
            depth=request.depth if drafts else 0,
            on_features=self._drafting.send_features,
            answer_seconds=self._services.answer_seconds,
            sampling=request.sampling,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            priority=request.priority,
            metadata=metadata_of(request.request_id, request.traceparent),
        )

    def _close(self, *, graceful: bool) -> None:
        self._drafting.close(graceful=graceful)
        self._teacher.close(graceful=graceful)
