"""What a peer gets wrong is told to it by field, and the service goes on."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from draft_service.main import DraftService
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.errors import details_of
from eagle_pangu.serving.settings import DraftSettings
from protos.v1 import draft_pb2, draft_pb2_grpc, tree_pb2
from tests.draft_service.peer import EPOCH, Stream, ask, failure, open_request, propose_request, serving

BAD_OPENS: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "no prompt": ({"prompt_token_ids": []}, grpc.StatusCode.INVALID_ARGUMENT, "open.prompt_token_ids: "),
    "an id past the vocabulary": (
        {"prompt_token_ids": [1, 100]},
        grpc.StatusCode.INVALID_ARGUMENT,
        "open.prompt_token_ids[1]: ",
    ),
    "a prompt past the context": (
        {"prompt_token_ids": [1] * 65},
        grpc.StatusCode.INVALID_ARGUMENT,
        "open.prompt_token_ids: ",
    ),
    "no request id": ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "open.request_id: "),
    "a budget past the maximum": (
        {"max_budget": tree_pb2.TreeBudget(rows=65)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "open.max_budget.rows: ",
    ),
    "no budget": ({"max_budget": None}, grpc.StatusCode.INVALID_ARGUMENT, "open.max_budget: expected a budget"),
    "an unknown drafter": ({"drafter": "crystal ball"}, grpc.StatusCode.NOT_FOUND, "'crystal ball'"),
    "a drafter without its model": ({"drafter": "standalone"}, grpc.StatusCode.NOT_FOUND, "'standalone'"),
}


@pytest.mark.parametrize("case", BAD_OPENS)
async def test_a_bad_open_ends_the_stream_and_names_what_is_wrong(case: str) -> None:
    changes, code, text = BAD_OPENS[case]
    async with serving() as stub:
        error = await failure(stub.Propose(), open_request(**changes))
        assert error.code() is code
        assert text in str(error.details())
        assert (await ask(stub.Propose(), open_request())).HasField("opened")


async def test_an_invalid_open_carries_a_field_violation() -> None:
    async with serving() as stub:
        status = details_of(await failure(stub.Propose(), open_request(request_id="")))
        assert status is not None
        assert status.details[0].type_url.endswith("google.rpc.BadRequest")


@pytest.mark.parametrize(
    ("first", "got"), [(propose_request(), "`propose`"), (draft_pb2.ProposeRequest(epoch=EPOCH), "nothing")]
)
async def test_a_session_begins_with_open(first: draft_pb2.ProposeRequest, got: str) -> None:
    async with serving() as stub:
        error = await failure(stub.Propose(), first)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error.details() == f"message: expected `open` as the first one of a session, got {got}"


async def test_a_stream_that_ends_before_its_open_is_told_what_was_expected() -> None:
    async with serving() as stub:
        stream = stub.Propose()
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await stream.details() == "message: expected `open` as the first one of a session, got nothing"


async def test_a_second_open_ends_the_stream() -> None:
    async with serving() as stub:
        error = await failure(stub.Propose(), open_request(), open_request())
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert str(error.details()).startswith("message: expected `propose` or `features`, got a second `open`")


REJECTED: dict[str, tuple[draft_pb2.ProposeRequest, int, str, int | None]] = {
    "a stale epoch": (propose_request(6, 9, epoch=EPOCH + 1), 9, "epoch", None),
    "a stale length": (propose_request(6, 8), 9, "committed_length", None),
    "a stale round": (propose_request(4, 9), 9, "round", None),
    "no round": (propose_request(0, 9), 3, "round", None),
    "nothing appended": (propose_request(6, 9, []), 3, "appended_token_ids", None),
    "an id past the vocabulary": (propose_request(6, 10, [1, 100]), 3, "appended_token_ids", 1),
    "no budget": (
        draft_pb2.ProposeRequest(
            epoch=EPOCH, propose=draft_pb2.ProposeTree(round=6, committed_length=9, appended_token_ids=[2])
        ),
        3,
        "budget",
        None,
    ),
    "too many rows": (propose_request(6, 9, rows=9), 3, "budget.rows", None),
    "too much depth": (propose_request(6, 9, depth=5), 3, "budget.depth", None),
    "an empty message": (draft_pb2.ProposeRequest(epoch=EPOCH), 3, "message", None),
    "features cut short": (
        draft_pb2.ProposeRequest(epoch=EPOCH, features=tree_pb2.Features(start=0, count=1, data=b"1234567")),
        3,
        "features.data",
        None,
    ),
    "a round with features cut short": (
        draft_pb2.ProposeRequest(
            epoch=EPOCH,
            propose=draft_pb2.ProposeTree(
                round=6,
                committed_length=9,
                appended_token_ids=[2],
                budget=tree_pb2.TreeBudget(rows=8, depth=2),
                features=[tree_pb2.Features(start=0, count=1, data=b"1234567")],
            ),
        ),
        3,
        "features.data",
        None,
    ),
    "features with a gap": (
        draft_pb2.ProposeRequest(epoch=EPOCH, features=tree_pb2.Features(start=1, count=1, data=b"12345678")),
        3,
        "features.start",
        None,
    ),
}


@pytest.mark.parametrize("case", REJECTED)
async def test_a_bad_message_is_rejected_in_band_and_the_session_lives(case: str) -> None:
    request, code, field, row = REJECTED[case]
    async with serving() as stub:
        stream = stub.Propose()
        await ask(stream, open_request())
        await ask(stream, propose_request(5))
        response = await ask(stream, request)
        rejection = response.rejection
        assert response.epoch == EPOCH
        assert (rejection.round, rejection.code, rejection.field) == (request.propose.round, code, field)
        assert (rejection.row if rejection.HasField("row") else None) == row
        assert rejection.reason
        assert (await ask(stream, propose_request(6, 9, [2]))).proposal.round == 6


async def test_bytes_that_are_no_message_end_one_stream_and_no_other() -> None:
    settings = DraftSettings()
    async with (
        running(DraftService(settings), settings) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        healthy = draft_pb2_grpc.DraftServiceStub(channel).Propose()
        await ask(healthy, open_request())
        broken: Stream = channel.stream_stream("/eagle_pangu.v1.DraftService/Propose")()
        await broken.write(b"\xff\xff\xff")
        assert await broken.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await ask(healthy, propose_request())).HasField("proposal")
