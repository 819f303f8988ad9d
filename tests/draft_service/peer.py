"""The other end of a draft session: a served drafter, a real gRPC stream, sound messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from draft_service.main import DraftService
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.settings import DraftSettings
from protos.v1 import draft_pb2, draft_pb2_grpc, model_pb2, tree_pb2

EPOCH = 3
PROMPT = [1, 2, 3, 9, 1, 2, 4, 9]
TEACHER = model_pb2.ModelFingerprint(
    model="teacher", tokenizer_sha256="ab" * 32, vocab_size=100, eos_token_ids=[0], feature_width=4, context_limit=64
)
MAX_BUDGET = tree_pb2.TreeBudget(rows=8, depth=4)

Stream = Any  # grpc.aio.StreamStreamCall of ProposeRequest, ProposeResponse


@asynccontextmanager
async def serving(settings: DraftSettings | None = None) -> AsyncIterator[draft_pb2_grpc.DraftServiceAsyncStub]:
    settings = settings or DraftSettings(slots=2)
    async with (
        running(DraftService(settings), settings) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield draft_pb2_grpc.DraftServiceStub(channel)


def open_request(**changes: Any) -> draft_pb2.ProposeRequest:
    values = {
        "request_id": "request",
        "teacher": TEACHER,
        "prompt_token_ids": PROMPT,
        "drafter": "ngram",
        "max_budget": MAX_BUDGET,
    }
    return draft_pb2.ProposeRequest(epoch=EPOCH, open=draft_pb2.OpenDraftSession(**{**values, **changes}))


def propose_request(
    round_number: int = 1, length: int = len(PROMPT), appended: Sequence[int] = (1,), epoch: int = EPOCH, **budget: int
) -> draft_pb2.ProposeRequest:
    message = draft_pb2.ProposeTree(
        round=round_number,
        committed_length=length,
        appended_token_ids=appended,
        budget=tree_pb2.TreeBudget(**{"rows": 8, "depth": 2, **budget}),
    )
    return draft_pb2.ProposeRequest(epoch=epoch, propose=message)


async def ask(stream: Stream, request: draft_pb2.ProposeRequest) -> draft_pb2.ProposeResponse:
    await stream.write(request)
    response = await stream.read()
    assert isinstance(response, draft_pb2.ProposeResponse), "the stream ended"
    return response


async def failure(stream: Stream, *requests: draft_pb2.ProposeRequest) -> grpc.aio.AioRpcError:
    """The status that ends the stream."""
    try:
        for request in requests:
            await ask(stream, request)
    except grpc.aio.AioRpcError as error:
        return error
    pytest.fail("the stream goes on")
