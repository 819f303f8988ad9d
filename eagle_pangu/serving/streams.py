"""Reading a session's messages off its stream: what both services do alike.

Of a message it knows that a oneof named `message` tells its kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from eagle_pangu.serving.errors import FailedPreconditionError, ServiceError
from eagle_pangu.serving.logs import get_logger
from protos.errors import InvalidFieldError

Message = TypeVar("Message", bound=ProtobufMessage)

log = get_logger(__name__)


class SessionIdleError(ServiceError):
    """The peer was silent for too long. ABORTED: the session cannot go on, but the peer may open another one."""

    code = grpc.StatusCode.ABORTED


async def next_message(
    requests: AsyncIterator[Message], message: type[Message], *, idle_seconds: float, setting: str
) -> Message | None:
    """The next message; None at the end of the stream.

    Only this wait is timed: a session that has work is not idle.

    Args:
        requests: of the session.
        message: their type.
        idle_seconds: longest wait.
        setting: that the longest wait comes from.

    Raises:
        SessionIdleError: nothing came in time.
        InvalidFieldError: what came is no such message.
    """
    try:
        async with asyncio.timeout(idle_seconds):
            return await anext(requests, None)
    except TimeoutError:
        log.warning("session idle", idle_seconds=idle_seconds)
        raise SessionIdleError(f"message: expected one within {idle_seconds:g} s ({setting}), got nothing") from None
    except DecodeError as error:
        raise InvalidFieldError(
            "message", f"expected a {message.__name__}, got bytes that do not parse as one"
        ) from error


def require_open(request: Message | None) -> Message:
    """The first message of a session, which must hold `open`; None: the stream ended before it.

    Raises:
        FailedPreconditionError: it holds something else, or nothing.
    """
    kind = None if request is None else request.WhichOneof("message")
    if request is None or kind != "open":
        got = f"`{kind}`" if kind else "nothing"
        raise FailedPreconditionError(f"message: expected `open` as the first one of a session, got {got}")
    return request
