"""What a peer reads when a servicer raises, and what it never reads."""

from __future__ import annotations

import json
import logging

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from eagle_pangu.serving.bootstrap import channel, running
from eagle_pangu.serving.errors import details_of
from eagle_pangu.serving.logs import configure_logging
from eagle_pangu.serving.settings import ServerSettings
from tests.serving.echo_service import SECRET, EchoService, EchoStub, ask


async def failure(what: str, request_id: str = "request-7") -> tuple[grpc.aio.AioRpcError, status_pb2.Status]:
    async with running(EchoService()) as port, channel(f"127.0.0.1:{port}", ServerSettings()) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await EchoStub(connection).echo(ask(what), metadata=(("x-request-id", request_id),))
    details = details_of(raised.value)
    assert details is not None
    assert details.code == raised.value.code().value[0]
    assert details.message == raised.value.details()
    return raised.value, details


async def test_an_invalid_field_names_field_and_row() -> None:
    error, status = await failure("invalid")
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "tree.parents[3]: expected an earlier row"
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    (violation,) = bad_request.field_violations
    assert (violation.field, violation.description) == ("tree.parents[3]", "expected an earlier row")


async def test_a_stale_message_is_a_failed_precondition_that_names_the_field() -> None:
    error, status = await failure("stale")
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    precondition = error_details_pb2.PreconditionFailure()
    assert status.details[0].Unpack(precondition)
    assert precondition.violations[0].subject == "round"


async def test_a_full_queue_says_when_to_try_again() -> None:
    error, status = await failure("full")
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500


async def test_a_failed_precondition_keeps_its_reason() -> None:
    error, _ = await failure("precondition")
    assert (error.code(), error.details()) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "the first message must be open",
    )


async def test_an_unexpected_exception_is_logged_under_the_request_id_and_its_text_stays_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    configure_logging("info", "echo")
    try:
        error, _ = await failure("unexpected", request_id="request-42")
    finally:
        root.handlers[:], root.level = handlers, level
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "request-42" in str(error.details())
    assert SECRET not in str(error)
    (line,) = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "internal error" in line]
    assert line["request_id"] == "request-42"
    assert line["service"] == "echo"
    assert SECRET in line["exception"]
