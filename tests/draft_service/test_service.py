"""The draft service over real gRPC: a session's story, and everything a peer can get wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.drafters.base import Budget
from draft_service.drafters.registry import DRAFTERS, Entry
from draft_service.main import DraftService
from eagle_pangu.serving.bootstrap import StartError, running
from eagle_pangu.serving.errors import details_of
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_tree, encode_features
from protos.v1 import draft_pb2, draft_pb2_grpc, model_pb2, tree_pb2

EPOCH = 3
PROMPT = [1, 2, 3, 9, 1, 2, 4, 9]
TEACHER = model_pb2.ModelFingerprint(
    model="teacher", tokenizer_sha256="ab" * 32, vocab_size=100, eos_token_ids=[0], feature_width=4, context_limit=64
)
MAX_BUDGET = tree_pb2.TreeBudget(rows=8, depth=4)

Stream = Any  # grpc.aio.StreamStreamCall of ProposeRequest, ProposeResponse


class ScriptedDrafter:
    """Proposes what the test says; waits and fails when told to."""

    name = "scripted"
    needs_features = True
    context_limit = 50
    identity = None

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.closed = threading.Event()
        self.failure: Exception | None = None
        self.features: list[tuple[int, tuple[int, ...]]] = []
        self.pieces = 0

    def open(self, prompt: Sequence[int], max_budget: Budget) -> ScriptedDrafter:
        self._root = prompt[-1]
        self.pieces = 3
        return self

    def extend(self, token_ids: Sequence[int]) -> None:
        self._root = token_ids[-1]

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        self.features.append((start, features.shape))

    def advance(self) -> bool:
        self.pieces -= 1
        return self.pieces > 0

    def propose(self, budget: Budget) -> TokenTree:
        self.begun.set()
        assert self.go_on.wait(30)
        if self.failure is not None:
            raise self.failure
        return TokenTree.build([self._root, 5], [0, 0], [0, -1])

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedDrafter:
    drafter = ScriptedDrafter()
    monkeypatch.setitem(DRAFTERS, "scripted", Entry(lambda settings: True, lambda settings: drafter))
    return drafter


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


async def test_a_session_opens_drafts_round_after_round_and_ends() -> None:
    async with serving() as stub:
        stream = stub.Propose()
        opened = await ask(stream, open_request())
        assert opened.epoch == EPOCH
        assert opened.opened == draft_pb2.DraftSessionOpened(drafter="ngram", needs_features=False, context_limit=0)
        first = (await ask(stream, propose_request())).proposal
        assert first.round == 1
        tree = TokenTree(*decode_tree(first.tree))
        tree.validate(vocab_size=100, max_rows=8, max_depth=2)
        assert tree.token_ids.tolist() == [1, 2, 4, 3]
        assert first.total_us >= first.draft_us > 0
        second = (await ask(stream, propose_request(2, len(PROMPT) + 2, [2, 3], rows=1))).proposal
        assert (second.round, list(second.tree.token_ids)) == (2, [3, 9])
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_repeat_is_answered_again() -> None:
    async with serving() as stub:
        stream = stub.Propose()
        await ask(stream, open_request())
        first = await ask(stream, propose_request())
        again = await ask(stream, propose_request())
        assert again.proposal.tree == first.proposal.tree


async def test_the_drafters_on_offer_are_those_that_the_settings_allow() -> None:
    async with serving() as stub:
        answer = await stub.GetDrafters(draft_pb2.GetDraftersRequest())
        assert list(answer.drafters) == ["ngram"]
        assert answer.default_drafter == "ngram"


async def test_a_session_that_names_no_drafter_gets_the_default_one() -> None:
    async with serving() as stub:
        assert (await ask(stub.Propose(), open_request(drafter=""))).opened.drafter == "ngram"


async def test_the_opener_learns_what_its_drafter_needs(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        opened = (await ask(stub.Propose(), open_request(drafter="scripted"))).opened
        assert (opened.needs_features, opened.context_limit) == (True, 50)


async def test_features_reach_the_drafter_before_the_round_they_precede(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        for start, count in ((0, 5), (5, 3)):
            features = encode_features(start, np.zeros((count, 4), dtype=np.uint16))
            await stream.write(draft_pb2.ProposeRequest(epoch=EPOCH, features=features))
        assert (await ask(stream, propose_request())).HasField("proposal")
        assert scripted.features == [(0, (5, 4)), (5, (3, 4))]


async def test_the_prompt_is_worked_off_without_waiting_for_a_round(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        await ask(stream, propose_request())
        assert scripted.pieces == 0


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


@pytest.mark.parametrize("first", [propose_request(), draft_pb2.ProposeRequest(epoch=EPOCH)])
async def test_a_session_begins_with_open(first: draft_pb2.ProposeRequest) -> None:
    async with serving() as stub:
        assert (await failure(stub.Propose(), first)).code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_second_open_ends_the_stream() -> None:
    async with serving() as stub:
        error = await failure(stub.Propose(), open_request(), open_request())
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION


REJECTED: dict[str, tuple[draft_pb2.ProposeRequest, int, str, int | None]] = {
    "a stale epoch": (propose_request(6, 9, epoch=EPOCH + 1), 9, "epoch", None),
    "a stale length": (propose_request(6, 8), 9, "committed_length", None),
    "a stale round": (propose_request(4, 9), 9, "round", None),
    "no round": (propose_request(0, 9), 3, "round", None),
    "nothing appended": (propose_request(6, 9, []), 3, "appended_token_ids", None),
    "an id past the vocabulary": (propose_request(6, 10, [1, 100]), 3, "appended_token_ids", 1),
    "too many rows": (propose_request(6, 9, rows=9), 3, "budget.rows", None),
    "too much depth": (propose_request(6, 9, depth=5), 3, "budget.depth", None),
    "an empty message": (draft_pb2.ProposeRequest(epoch=EPOCH), 3, "message", None),
    "features cut short": (
        draft_pb2.ProposeRequest(epoch=EPOCH, features=tree_pb2.Features(start=0, count=1, data=b"1234567")),
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


async def test_past_its_slots_the_service_refuses_and_a_freed_slot_is_taken_again(scripted: ScriptedDrafter) -> None:
    async with serving(DraftSettings(slots=1)) as stub:
        first = stub.Propose()
        await ask(first, open_request(drafter="scripted"))
        error = await failure(stub.Propose(), open_request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = details_of(error)
        assert status is not None
        assert status.details[0].type_url.endswith("google.rpc.RetryInfo")
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        assert await asyncio.to_thread(scripted.closed.wait, 30)
        assert (await ask(stub.Propose(), open_request())).HasField("opened")


async def test_a_session_cancelled_in_the_middle_of_its_work_is_closed_after_it(scripted: ScriptedDrafter) -> None:
    async with serving(DraftSettings(slots=2)) as stub:
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        scripted.go_on.clear()
        await stream.write(propose_request())
        assert await asyncio.to_thread(scripted.begun.wait, 30)
        stream.cancel()
        # Another drafter's sessions are not held up meanwhile.
        assert (await ask(stub.Propose(), open_request())).HasField("opened")
        assert not scripted.closed.is_set()
        scripted.go_on.set()
        assert await asyncio.to_thread(scripted.closed.wait, 30)


async def test_a_drafter_that_fails_ends_its_session_and_tells_no_secrets(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        scripted.failure = RuntimeError("the secret")
        error = await failure(stub.Propose(), open_request(drafter="scripted"), propose_request())
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(error.details())
        scripted.failure = None
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        assert (await ask(stream, propose_request())).HasField("proposal")


async def test_the_service_does_not_start_when_its_default_drafter_has_no_model() -> None:
    settings = DraftSettings(drafter="standalone")
    with pytest.raises(StartError, match=r"draft\.model"):
        async with serving(settings):
            pass


async def test_the_service_does_not_start_when_the_model_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"draft\.model"):
        async with serving(DraftSettings(model=str(tmp_path / "nothing"))):
            pass


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


async def test_a_teacher_with_the_draft_models_tokenizer_is_served_and_any_other_is_told_both_sides(
    model_directory: Path,
) -> None:
    import torch

    from eagle_pangu.speculation.checkpoints import load_checkpoint
    from eagle_pangu.speculation.devices import get_device
    from tests.models import EOS, VOCAB_SIZE

    ours = load_checkpoint(model_directory, torch.float32, get_device("cpu")).tokenizer.sha256
    settings = DraftSettings(
        drafter="standalone", model=str(model_directory), dtype="float32", threads=1, slot_capacity=128
    )
    same = model_pb2.ModelFingerprint(
        model="big", tokenizer_sha256=ours, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], context_limit=512
    )
    async with serving(settings) as stub:
        answer = await stub.GetDrafters(draft_pb2.GetDraftersRequest())
        assert list(answer.drafters) == ["ngram", "standalone"]
        stream = stub.Propose()
        opened = (await ask(stream, open_request(drafter="", teacher=same))).opened
        assert opened == draft_pb2.DraftSessionOpened(drafter="standalone", needs_features=False, context_limit=128)
        tree = TokenTree(*decode_tree((await ask(stream, propose_request())).proposal.tree))
        tree.validate(vocab_size=VOCAB_SIZE, max_rows=8, max_depth=2)
        assert tree.drafted == 8

        other = model_pb2.ModelFingerprint()
        other.CopyFrom(same)
        other.tokenizer_sha256 = "cd" * 32
        error = await failure(stub.Propose(), open_request(drafter="", teacher=other))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        for part in ("'big'", f"'{model_directory.name}'", ours, "cd" * 32):
            assert part in str(error.details())
        assert (await ask(stub.Propose(), open_request(drafter="ngram", teacher=other))).HasField("opened")
