"""The other end of a teacher session: a real gRPC stream, and a decoder that runs a whole answer over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.errors import details_of
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import encode_tree
from protos.v1 import model_pb2, teacher_pb2, teacher_pb2_grpc, tree_pb2
from teacher_service.main import TeacherService

SETTINGS = TeacherSettings(slots=2, queue_limit=1, slot_capacity=100, prefill_chunk=4, max_rows=8, max_depth=4)
STORY_SECONDS = 60  # a story that waits for what never comes fails then, and still cleans up


class Served:
    """A running teacher and a stub to it."""

    def __init__(self, service: TeacherService, connection: grpc.aio.Channel) -> None:
        self.service = service
        self.connection = connection
        self.stub = teacher_pb2_grpc.TeacherServiceStub(connection)
        self.fingerprint = model_pb2.ModelFingerprint()

    def session(self) -> PeerSession:
        return PeerSession(self.stub, self.fingerprint)


@asynccontextmanager
async def serving(engine: Any, **changes: Any) -> AsyncIterator[Served]:
    """A teacher over `engine` (or over a function that builds one) on a port of its own, for STORY_SECONDS at most."""
    settings = SETTINGS.model_copy(update=changes)
    build = engine if callable(engine) else lambda _settings: engine
    service = TeacherService(settings, build, measure=lambda engine: ())
    async with (
        asyncio.timeout(STORY_SECONDS),
        running(service, settings) as port,
        channel(f"127.0.0.1:{port}", settings) as connection,
    ):
        served = Served(service, connection)
        served.fingerprint = (await served.stub.GetModel(teacher_pb2.GetModelRequest())).fingerprint
        yield served


class PeerSession:
    """One stream, in the words of the protocol."""

    def __init__(self, stub: teacher_pb2_grpc.TeacherServiceStub, fingerprint: model_pb2.ModelFingerprint) -> None:
        self.call = stub.Verify()
        self.features: list[tree_pb2.Features] = []
        self.prompt_logprobs: list[teacher_pb2.PromptLogprobs] = []
        self.prefilled = teacher_pb2.Prefilled()
        self.opened = teacher_pb2.TeacherSessionOpened()
        self._fingerprint = fingerprint
        self.epoch = 1

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended."""
        return await self.call.code(), await self.call.details()

    async def error_detail(self, message: Any) -> Any:
        """`message`, filled from the google.rpc detail of the status that ends the stream."""
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            status = details_of(error)
            assert status is not None
            assert status.details[0].Unpack(message)
            return message
        raise AssertionError("the stream ended without an error")

    async def send(self, **message: Any) -> None:
        await self.call.write(teacher_pb2.VerifyRequest(epoch=message.pop("epoch", self.epoch), **message))

    async def read(self) -> teacher_pb2.VerifyResponse:
        response = await self.call.read()
        if response is grpc.aio.EOF:
            raise EOFError(await self.call.code())
        assert response.epoch == self.epoch
        return response

    async def send_open(self, prompt: Sequence[int], **fields: Any) -> None:
        """`open` with defaults that suit the tests."""
        message = teacher_pb2.OpenTeacherSession(
            **{
                "request_id": "test",
                "fingerprint": self._fingerprint,
                "prompt_token_ids": prompt,
                "max_new_tokens": 40,
                "max_budget": tree_pb2.TreeBudget(rows=8, depth=4),
                **fields,
            }
        )
        await self.send(open=message)

    async def read_prefilled(self) -> teacher_pb2.Prefilled:
        self.opened = (await self.read()).opened
        while (response := await self.read()).WhichOneof("message") in ("features", "prompt_logprobs", "reading"):
            if response.HasField("features"):
                self.features.append(response.features)
            elif response.HasField("prompt_logprobs"):
                self.prompt_logprobs.append(response.prompt_logprobs)
        assert response.WhichOneof("message") == "prefilled"
        self.prefilled = response.prefilled
        return self.prefilled

    async def open(self, prompt: Sequence[int], **fields: Any) -> teacher_pb2.Prefilled:
        await self.send_open(prompt, **fields)
        return await self.read_prefilled()

    async def send_verify(
        self, number: int, committed_length: int, commit: int, tree: TokenTree | tree_pb2.TokenTree, epoch: int = 1
    ) -> None:
        message = tree if isinstance(tree, tree_pb2.TokenTree) else encode_tree(tree.token_ids, tree.parents)
        await self.send(
            epoch=epoch,
            verify=teacher_pb2.VerifyTree(round=number, committed_length=committed_length, commit=commit, tree=message),
        )

    async def verify(
        self, number: int, committed_length: int, commit: int, tree: TokenTree | tree_pb2.TokenTree, epoch: int = 1
    ) -> teacher_pb2.VerifyResponse:
        await self.send_verify(number, committed_length, commit, tree, epoch)
        return await self.read()

    async def verdict(self, number: int, committed_length: int, commit: int, tree: TokenTree) -> teacher_pb2.Verdict:
        response = await self.verify(number, committed_length, commit, tree)
        assert response.WhichOneof("message") == "verdict", response
        return response.verdict

    async def close(self) -> grpc.StatusCode:
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        return await self.call.code()

    async def decode(
        self, prompt: Sequence[int], tokens: int, draft: Callable[[list[int]], TokenTree], **fields: Any
    ) -> list[int]:
        """A whole answer: `draft` makes a tree from prompt and answer so far, whose last token is the root."""
        answer = [(await self.open(prompt, **fields)).next_token_id]
        committed, commit, number = len(prompt), 0, 0
        while len(answer) < tokens:
            number += 1
            tree = draft([*prompt, *answer])
            verdict = await self.verdict(number, committed, commit, tree)
            answer += [int(tree.token_ids[row]) for row in verdict.accepted_rows] + [verdict.next_token_id]
            commit = len(verdict.accepted_rows)
            committed += commit + 1
        return answer[:tokens]


async def until(condition: Callable[[], bool]) -> None:
    """Give way to the event loop until `condition` holds; the story's own limit bounds it."""
    while not condition():  # noqa: ASYNC110 -- what it waits for has no event, and no time passes here
        await asyncio.sleep(0)
