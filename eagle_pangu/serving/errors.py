"""The one table from errors to gRPC statuses, with google.rpc details.

A servicer raises; it never writes a status by hand. What a peer can cause is told to it, with field and row; the text
of an unexpected exception stays in the log, under the request id. Knows nothing of any one service.
"""

from __future__ import annotations

import uuid
from typing import Any, NoReturn, Protocol

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from eagle_pangu.serving.logs import get_logger
from protos.errors import InvalidFieldError, InvalidRequestError, StaleMessageError

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "eagle_pangu"

log = get_logger(__name__)


class ServiceError(Exception):
    """An error that a peer may read.

    Attributes:
        reason: What happened, in one sentence.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class FailedPreconditionError(ServiceError):
    """The call does not fit the state of the session or the model."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFoundError(ServiceError):
    """What was asked for by name does not exist here."""

    code = grpc.StatusCode.NOT_FOUND


class UnavailableError(ServiceError):
    """The service, or one it needs, cannot answer now; the call may be tried again elsewhere."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(ServiceError):
    """The work did not end in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ResourceExhaustedError(ServiceError):
    """A queue or a pool is full.

    Attributes:
        retry_after_seconds: When to try again; sent as google.rpc.RetryInfo.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, reason: str, retry_after_seconds: float = 1.0) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(reason)


class ServicerContext(Protocol):
    """The part of grpc.aio.ServicerContext that ends a call."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn: ...


def status_of(error: Exception) -> status_pb2.Status | None:
    """The rich status of an error that a peer may read; None for an unexpected one."""
    if isinstance(error, InvalidFieldError | InvalidRequestError):
        violations = (error,) if isinstance(error, InvalidFieldError) else error.violations
        bad_request = error_details_pb2.BadRequest(field_violations=[_violation(each) for each in violations])
        return _status(grpc.StatusCode.INVALID_ARGUMENT, str(error), bad_request)
    if isinstance(error, StaleMessageError):
        precondition = error_details_pb2.PreconditionFailure.Violation(
            type="STALE_MESSAGE", subject=error.field, description=error.reason
        )
        failure = error_details_pb2.PreconditionFailure(violations=[precondition])
        return _status(grpc.StatusCode.FAILED_PRECONDITION, str(error), failure)
    if isinstance(error, ResourceExhaustedError):
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        return _status(error.code, error.reason, error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, ServiceError):
        return _status(error.code, error.reason)
    return None


async def abort_with(context: ServicerContext, error: Exception, *, request_id: str = "") -> NoReturn:
    """End a call with the status of `error`; log what the peer must not read.

    Args:
        context: The call.
        error: Anything that the servicer raised.
        request_id: Named in the status of an unexpected error; empty: the one bound to the log context, else a new one.
    """
    status = status_of(error)
    if status is None:
        bound = structlog.contextvars.get_contextvars().get("request_id")
        request_id = request_id or str(bound or uuid.uuid4().hex)
        log.error("internal error", request_id=request_id, exc_info=error)
        status = _status(grpc.StatusCode.INTERNAL, f"internal error; the log has it under request id {request_id}")
    await context.abort(CODES[status.code], status.message, ((DETAILS_KEY, status.SerializeToString()),))


CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
"""google.rpc.Code -> status code."""


def details_of(error: grpc.RpcError) -> status_pb2.Status | None:
    """The rich status that a server sent with an error; None when it sent none."""
    trailing: Any = error.trailing_metadata()  # typed unlike in the two kinds of errors
    for key, value in trailing or ():
        if key == DETAILS_KEY:
            return status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
    return None


def retry_seconds_of(error: grpc.RpcError) -> float | None:
    """When the server said to try again (google.rpc.RetryInfo), in seconds from now; None when it did not."""
    status = details_of(error)
    packed: AnyMessage
    for packed in status.details if status else ():
        info = error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            return float(info.retry_delay.ToNanoseconds()) / 1e9
    return None


def _violation(error: InvalidFieldError) -> error_details_pb2.BadRequest.FieldViolation:
    field = error.field if error.row is None else f"{error.field}[{error.row}]"
    return error_details_pb2.BadRequest.FieldViolation(field=field, description=error.reason)


def _status(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status
