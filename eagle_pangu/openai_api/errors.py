"""What goes wrong, in OpenAI's form: {"error": {"message", "type", "param", "code"}} and an HTTP status.

The one table from gRPC statuses to HTTP ones. Only what our services said is told on: the text of a failed connection
names hosts and stays in the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import grpc
import grpc.aio
from pydantic import ValidationError

from eagle_pangu.client.client import violations_of
from eagle_pangu.serving.errors import details_of, retry_seconds_of
from eagle_pangu.serving.logs import get_logger

MOST_VIOLATIONS = 20
QUOTED_CHARACTERS = 60
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

log = get_logger(__name__)


class Kind(NamedTuple):
    """HTTP status and OpenAI's `type` of an error."""

    status: int
    type: str


INTERNAL = Kind(500, SERVER_ERROR)
KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: Kind(400, INVALID_REQUEST),
    grpc.StatusCode.RESOURCE_EXHAUSTED: Kind(429, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: Kind(503, SERVER_ERROR),
    grpc.StatusCode.DEADLINE_EXCEEDED: Kind(504, SERVER_ERROR),
}
CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "json_invalid": "invalid_json",
}
"""pydantic's type of a problem -> OpenAI's code of an error; others are `invalid_value`."""


class ApiError(Exception):
    """The end of a request that a client may read.

    Args:
        status: of HTTP.
        message: what was expected, in one sentence.
        type: OpenAI's class of the error.
        param: the field at fault, by its HTTP name.
        code: short and stable, for programs.
        retry_after_seconds: when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,  # noqa: A002 - OpenAI's name
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        self.status = status
        self.error = {"message": message, "type": type, "param": param, "code": code}
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response, or of the event that ends a stream."""
        return {"error": self.error}

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After, in whole seconds and never 0, where it is known."""
        after = self.retry_after_seconds
        return {} if after is None else {"retry-after": str(max(1, math.ceil(after)))}


def internal_error(request_id: str) -> ApiError:
    """An error of which the client is told only where to look."""
    message = f"internal error; the log has it under request id {request_id}"
    return ApiError(INTERNAL.status, message, type=INTERNAL.type, code="internal")


def refusal_of(error: ValidationError) -> ApiError:
    """A 400 with every problem of a request's JSON; `param` and `code` are the first one's."""
    problems = error.errors(include_url=False)[:MOST_VIOLATIONS]
    fields = [_field_of(problem) for problem in problems]
    said = [_explain(field, problem) for field, problem in zip(fields, problems, strict=True)]
    code = CODES.get(problems[0]["type"], "invalid_value")
    return ApiError(400, "; ".join(said), param=fields[0] or None, code=code)


def error_of(error: grpc.aio.AioRpcError, http_field: Callable[[str], str]) -> ApiError:
    """What a client is told of a call that failed.

    Args:
        error: any status but OK.
        http_field: from the path of a field of the gRPC request ("options.stop[1]") to its HTTP name.
    """
    kind = KINDS.get(error.code(), INTERNAL)
    code = error.code().name.lower()
    violations = [(http_field(each.field), each.reason) for each in violations_of(error)]
    if violations:
        message = "; ".join(f"{field}: {reason}" for field, reason in violations)
        return ApiError(kind.status, message, type=kind.type, param=violations[0][0], code="invalid_value")
    if details_of(error) is None:
        log.warning("the orchestrator gave no answer", code=code, reason=error.details())
        message = f"no answer from the orchestrator ({code})"
    else:
        message = error.details() or code
    return ApiError(kind.status, message, type=kind.type, code=code, retry_after_seconds=retry_seconds_of(error))


def _field_of(problem: Any) -> str:
    """As in ``messages[0].content``; empty for the body as a whole."""
    return problem.get("ctx", {}).get("field") or path_of(problem["loc"])


def path_of(location: Iterable[str | int]) -> str:
    """Names with points between, positions in brackets."""
    path = ""
    for part in location:
        if part != "[key]":
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _explain(field: str, problem: Any) -> str:
    where = f"{field}: " if field else ""
    if problem["type"] == "extra_forbidden":
        return f"{where}unknown or not supported here"
    if problem["type"] == "missing":
        return f"{where}expected a value, got none"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if problem["type"] in ("together", "json_invalid"):
        return f"{where}{message}"
    given = ascii(problem["input"])
    quoted = given if len(given) <= QUOTED_CHARACTERS else given[:QUOTED_CHARACTERS] + "..."
    return f"{where}{message}, got {quoted}"
