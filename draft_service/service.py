"""The gRPC face of the drafters: parse, validate, call, convert.

What it raises becomes a status in `eagle_pangu.serving.errors`; a bad message after the open is answered in band, and
its session goes on. The stream is the session: however it ends, the slot is free again. It computes nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import structlog
from grpc.aio import ServicerContext

from draft_service import messages
from draft_service.desk import Desk
from draft_service.drafters.base import Budget
from draft_service.opening import Opening
from draft_service.session import Session
from draft_service.slots import Slots
from eagle_pangu.serving.errors import FailedPreconditionError, NotFoundError
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.streams import next_message, require_open
from protos.errors import InvalidFieldError, StaleMessageError
from protos.v1 import draft_pb2, draft_pb2_grpc

log = get_logger(__name__)

Requests = AsyncIterator[draft_pb2.ProposeRequest]
Responses = AsyncIterator[draft_pb2.ProposeResponse]
Context: TypeAlias = "ServicerContext[Any, Any]"


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The sessions of all drafters.

    Args:
        desks: by name of the drafter; may be filled later.
        default_drafter: of sessions that name none.
        slots: sessions held at once.
        most: largest budget that a session may open with.
        idle_seconds: longest wait for a session's next message.
    """

    def __init__(
        self, desks: Mapping[str, Desk], default_drafter: str, slots: Slots, most: Budget, idle_seconds: float
    ) -> None:
        self._desks = desks
        self._default_drafter = default_drafter
        self._slots = slots
        self._most = most
        self._idle_seconds = idle_seconds

    async def GetDrafters(  # noqa: N802 -- gRPC's name
        self, request: draft_pb2.GetDraftersRequest, context: Context
    ) -> draft_pb2.GetDraftersResponse:
        """The drafters on offer."""
        shapes = {name: desk.drafter.shapes for name, desk in self._desks.items()}
        return draft_pb2.GetDraftersResponse(
            drafters=list(self._desks),
            default_drafter=self._default_drafter,
            shapes=messages.write_shapes(shapes),
        )

    async def Propose(self, requests: Requests, context: Context) -> Responses:  # noqa: N802
        """One session."""
        read = partial(
            next_message,
            requests,
            draft_pb2.ProposeRequest,
            idle_seconds=self._idle_seconds,
            setting="draft.session_idle_seconds",
        )
        opening, desk = self._read_open(require_open(await read()))
        structlog.contextvars.bind_contextvars(request_id=opening.request_id, epoch=opening.epoch)
        with self._slots.hold():
            async with desk.open(opening) as session:
                log.info("session opened", drafter=opening.drafter, prompt_tokens=len(opening.prompt))
                try:
                    yield messages.opened(opening.epoch, desk.drafter)
                    await desk.advance(session)
                    while (request := await read()) is not None:
                        response = await _answer(request, opening, session, desk)
                        if response is not None:
                            yield response
                finally:
                    log.info("session ended", round=session.round, tokens=session.length)

    def _read_open(self, request: draft_pb2.ProposeRequest) -> tuple[Opening, Desk]:
        opening = messages.read_opening(request.epoch, request.open, self._default_drafter)
        desk = self._desks.get(opening.drafter)
        if desk is None:
            raise NotFoundError(f"open.drafter: expected one of {', '.join(self._desks)}, got {opening.drafter!r}")
        if desk.drafter.identity is not None:
            messages.require_same_ids(desk.drafter.identity, request.open.teacher)
        opening.validate(self._most)
        return opening, desk


async def _answer(
    request: draft_pb2.ProposeRequest, opening: Opening, session: Session, desk: Desk
) -> draft_pb2.ProposeResponse | None:
    """A proposal, a rejection, or nothing for features that are in order."""
    received, epoch = time.monotonic(), opening.epoch
    kind = request.WhichOneof("message")
    if kind == "open":
        raise FailedPreconditionError(
            "message: expected `propose` or `features`, got a second `open`; open another stream"
        )
    try:
        session.check_epoch(request.epoch)
        if kind == "propose":
            question = messages.read_question(request.propose)
            features = [messages.read_features(each, opening.feature_width) for each in request.propose.features]
            drafted = await desk.propose(session, question, features)
            total_us = _microseconds_since(received)
            return messages.proposal(epoch, question.round, drafted.value, drafted.run_us, total_us)
        if kind == "features":
            await desk.read_features(session, messages.read_features(request.features, opening.feature_width))
            await desk.advance(session)
            return None
        raise InvalidFieldError("message", "expected `propose` or `features`, got nothing")
    except (InvalidFieldError, StaleMessageError) as error:
        log.warning("message refused", round=request.propose.round, field=error.field, reason=error.reason)
        return messages.rejection(epoch, request.propose.round, error)


def _microseconds_since(start: float) -> int:
    return round((time.monotonic() - start) * 1e6)
