"""A draft that follows a script, as a real gRPC service, and scripts; what breaks the contract is kept in `faults`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc.aio

from eagle_pangu.speculation.tree import TokenTree
from protos.codec import encode_tree
from protos.v1 import draft_pb2, draft_pb2_grpc, teacher_pb2, tree_pb2
from tests.orchestrator.scripted.language import NextToken
from tests.orchestrator.scripted.teacher import ScriptedTeacher


@dataclass
class Asked:
    """What a plan sees. sequence: prompt and answer, the root last. number: of the question, from 0, over all
    sessions. epoch, round: on the wire. features: tokens whose features came with the question."""

    number: int
    epoch: int
    round: int
    sequence: list[int]
    rows: int
    depth: int
    features: int


Planned = TokenTree | tree_pb2.TokenTree | teacher_pb2.Rejection | list[draft_pb2.ProposeResponse]
Plan = Callable[[Asked], Planned]


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Proposes by `plan` (or says whatever messages it gives); `on_propose` runs before and may wait or abort.

    While `awake` is clear it is as a stopped process: connections stay up, and nothing is read or answered.
    """

    def __init__(self, plan: Plan, teacher: ScriptedTeacher) -> None:
        self.plan = plan
        self.teacher = teacher
        self.needs_features = False
        self.context_limit = 0
        self.drafters = ["scripted", "other"]
        self.sessions: list[draft_pb2.OpenDraftSession] = []
        self.asked: list[Asked] = []
        self.answers = 0
        self.answered = asyncio.Condition()
        self.features: list[int] = []
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.faults: list[str] = []
        self.on_open: Callable[[grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.on_propose: Callable[[Asked, grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.awake = asyncio.Event()
        self.awake.set()
        self.calls_of_get_drafters = 0
        self.calls_of_propose = 0

    async def GetDrafters(self, request, context):  # noqa: N802
        self.calls_of_get_drafters += 1
        await self.awake.wait()
        return draft_pb2.GetDraftersResponse(drafters=self.drafters, default_drafter=self.drafters[0])

    async def Propose(self, requests, context) -> AsyncIterator[draft_pb2.ProposeResponse]:  # noqa: N802
        self.calls_of_propose += 1
        self.active += 1
        self.idle.clear()
        try:
            await self.awake.wait()
            async for response in self._session(requests, context):
                yield response
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    async def _session(self, requests, context) -> AsyncIterator[draft_pb2.ProposeResponse]:
        first = await anext(requests)
        epoch, opening = first.epoch, first.open
        self.sessions.append(opening)
        if self.on_open is not None:
            await self.on_open(context)
        yield draft_pb2.ProposeResponse(
            epoch=epoch,
            opened=draft_pb2.DraftSessionOpened(
                drafter=opening.drafter or self.drafters[0],
                needs_features=self.needs_features,
                context_limit=self.context_limit,
            ),
        )
        sequence, features, round_before = list(opening.prompt_token_ids), [], 0
        async for request in requests:
            await self.awake.wait()
            self._check(request.epoch == epoch, "stale epoch")
            if request.HasField("features"):
                self._read_features(request.features, features)
                continue
            propose = request.propose
            for each in propose.features:
                self._read_features(each, features)
            sequence += propose.appended_token_ids
            self._check(len(propose.appended_token_ids) >= 1, "nothing appended")
            self._check(propose.committed_length == len(sequence) - 1, "wrong committed length")
            self._check(propose.round > round_before, "rounds do not ascend")
            self._check(sequence[-1] == self.teacher.next_token(sequence[:-1]), "wrong root")
            self._check(propose.budget.rows <= opening.max_budget.rows, "rows over the session's budget")
            self._check(propose.budget.depth <= opening.max_budget.depth, "depth over the session's budget")
            if self.needs_features:
                self._check(len(features) == len(sequence) - 1, f"{len(features)} features of {len(sequence) - 1}")
            round_before = propose.round
            budget = propose.budget
            told = sum(each.count for each in propose.features)
            asked = Asked(len(self.asked), epoch, propose.round, list(sequence), budget.rows, budget.depth, told)
            self.asked.append(asked)
            if self.on_propose is not None:
                await self.on_propose(asked, context)
            for response in self._responses(asked, self.plan(asked)):
                yield response
            async with self.answered:
                self.answers += 1
                self.answered.notify_all()

    def _responses(self, asked: Asked, planned: Planned) -> list[draft_pb2.ProposeResponse]:
        if isinstance(planned, list):
            return planned
        if isinstance(planned, teacher_pb2.Rejection):
            return [draft_pb2.ProposeResponse(epoch=asked.epoch, rejection=planned)]
        return [proposal(asked, planned)]

    def _read_features(self, message: tree_pb2.Features, features: list[int]) -> None:
        self._check(message.start == len(features), "features do not follow")
        features += [message.data[at] for at in range(0, len(message.data), 8)]
        self.features = features

    def _check(self, right: bool, fault: str) -> None:
        if not right:
            self.faults.append(fault)


def proposal(asked: Asked, tree: TokenTree | tree_pb2.TokenTree, **changes: int) -> draft_pb2.ProposeResponse:
    """The answer to a question; `changes` of epoch and round."""
    message = encode_tree(tree.token_ids, tree.parents) if isinstance(tree, TokenTree) else tree
    return draft_pb2.ProposeResponse(
        epoch=changes.get("epoch", asked.epoch),
        proposal=draft_pb2.Proposal(round=changes.get("round", asked.round), tree=message, draft_us=10, total_us=15),
    )


def knowing(next_token: NextToken, right: Callable[[int], int]) -> Plan:
    """A chain as deep as the budget: so many right tokens as `right` says for the question, then wrong ones."""

    def plan(asked: Asked) -> TokenTree:
        history, tokens = list(asked.sequence), [asked.sequence[-1]]
        for position in range(min(asked.rows, asked.depth)):
            true = next_token(history)
            tokens.append(true if position < right(asked.number) else (true + 1) % 256)
            history.append(tokens[-1])
        return TokenTree.build(tokens, [0, *range(len(tokens) - 1)])

    return plan


def branching(next_token: NextToken) -> Plan:
    """Under each right token a wrong sibling first, which has a child of its own: accepted rows are not dense."""

    def plan(asked: Asked) -> TokenTree:
        history, tokens, parents, at = list(asked.sequence), [asked.sequence[-1]], [0], 0
        for depth in range(asked.depth):
            if len(tokens) + 2 > asked.rows:
                break
            true = next_token(history)
            wrong = len(tokens)
            tokens += [(true + 1) % 256, true]
            parents += [at, at]
            if depth + 1 < asked.depth:
                tokens.append(true)
                parents.append(wrong)
            at = wrong + 1
            history.append(true)
        return TokenTree.build(tokens, parents)

    return plan
