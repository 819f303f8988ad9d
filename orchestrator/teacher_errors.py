"""How a session of the teacher may end before its request does, and what each end means for the request."""

from __future__ import annotations

import grpc
import grpc.aio

from eagle_pangu.serving.errors import (
    DeadlineExceededError,
    ResourceExhaustedError,
    UnavailableError,
    retry_seconds_of,
)

RETRY_SECONDS = 1.0  # where a full teacher names no time


class TeacherLostError(Exception):
    """The session is over though the request is not; another one may go on.

    Args:
        reason: for the caller.
        details: for the log alone: a transport's own words name addresses.
    """

    def __init__(self, reason: str, details: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {details}" if details else reason)


class TeacherChangedError(UnavailableError):
    """The teacher is not the one whose tokenizer is in use here: it was replaced by another model."""


class TeacherError(Exception):
    """The teacher and this program disagree on the contract: a fault of the program, not of the caller."""


def meaning_of(error: grpc.aio.AioRpcError) -> Exception:
    """What the end of the stream means for the request."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # the request's: no other deadline goes with the call
        return DeadlineExceededError("the request's deadline passed")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        named = retry_seconds_of(error)
        return ResourceExhaustedError(f"teacher: {details}", RETRY_SECONDS if named is None else named)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return TeacherChangedError(f"the teacher refused the session: {details}")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return TeacherError(f"{code.name}: {details}")
    return TeacherLostError(code.name, details)
