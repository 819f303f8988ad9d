"""The names of the drafters on offer, asked of the draft service and remembered."""

from __future__ import annotations

import grpc
import grpc.aio

from eagle_pangu.serving.logs import get_logger
from orchestrator.breaker import CircuitBreaker
from orchestrator.requests import TEACHER_ONLY
from protos.v1 import draft_pb2, draft_pb2_grpc

ANSWER_SECONDS = 1.0
REST_SECONDS = 5.0

log = get_logger(__name__)


class Drafters:
    """What the draft service offers.

    Args:
        stub: of the service; None: there is none, so teacher-only is all there is.
        default: of requests that name no drafter; empty: the service's own default.
    """

    def __init__(self, stub: draft_pb2_grpc.DraftServiceAsyncStub | None, default: str) -> None:
        self._stub = stub
        self._default = default
        self._offered: draft_pb2.GetDraftersResponse | None = None
        self._breaker = CircuitBreaker(REST_SECONDS, self._ask)

    @property
    def default(self) -> str:
        """Drafter of requests that name none; empty while only the service knows."""
        if self._stub is None:
            return TEACHER_ONLY
        return self._default or (self._offered.default_drafter if self._offered else "")

    async def names(self, wanted: str = "") -> tuple[str, ...] | None:
        """The names on offer, "none" left out; None when they are not known and cannot be learned now.

        Args:
            wanted: ask again when it is not among those remembered: the service may have been replaced.
        """
        if self._stub is None:
            return ()
        remembered = self._offered is not None and (wanted in ("", TEACHER_ONLY) or wanted in self._offered.drafters)
        if not remembered and not self._breaker.is_open:
            if await self._ask():
                self._breaker.answered()
            else:
                self._breaker.trip()
        return tuple(self._offered.drafters) if self._offered else None

    async def _ask(self) -> bool:
        """Whether there was an answer in time; a refusal is one."""
        assert self._stub is not None
        try:
            self._offered = await self._stub.GetDrafters(draft_pb2.GetDraftersRequest(), timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning("drafters not known", reason=f"{error.code().name}: {error.details()}")
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        return True
