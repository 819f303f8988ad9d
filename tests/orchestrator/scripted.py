"""A teacher and a draft that follow a script, as real gRPC services that hold their peer to the contract.

The teacher's next token is a function of the whole history, so that one wrong token, length or commit anywhere gives a
wrong answer; whatever breaks the contract is kept in `faults`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_tree, encode_tree
from protos.fingerprint import tokenizer_sha256
from protos.v1 import draft_pb2, draft_pb2_grpc, model_pb2, teacher_pb2, teacher_pb2_grpc, tree_pb2

EOS = 257
VOCAB_SIZE = 258
FEATURE_WIDTH = 4
CONTEXT_LIMIT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

NextToken = Callable[[Sequence[int]], int]


def byte_tokenizer() -> Tokenizer:
    """One id a byte, and two special ones: every byte sequence is a text, every text has ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


TOKENIZER = byte_tokenizer()
TOKENIZER_JSON = TOKENIZER.to_str().encode()


def ids_of(text: str) -> list[int]:
    """Ids of raw text."""
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def scrambled(history: Sequence[int]) -> int:
    """A byte that depends on every token before it; never a special one."""
    digest = hashlib.blake2b(repr(list(history)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") % 256


def saying(prompt_tokens: int, answer: Sequence[int]) -> NextToken:
    """A teacher that gives this answer to prompts of that length, and scrambles after a history that left it."""

    def next_token(history: Sequence[int]) -> int:
        said = list(history[prompt_tokens:])
        if len(said) < len(answer) and said == list(answer[: len(said)]):
            return answer[len(said)]
        return scrambled(history)

    return next_token


def plain(next_token: NextToken, prompt: Sequence[int], tokens: int) -> list[int]:
    """The teacher-only answer, without end."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


@dataclass
class TeacherSessionRecord:
    """What one teacher session was asked."""

    open: teacher_pb2.OpenTeacherSession
    epoch: int
    metadata: dict[str, str]
    rounds: list[teacher_pb2.VerifyTree] = field(default_factory=list)


class ScriptedTeacher(teacher_pb2_grpc.TeacherServiceServicer):
    """Decides by `next_token`; `on_verify` runs before each verdict and may wait, abort or raise."""

    def __init__(self, next_token: NextToken = scrambled) -> None:
        self.next_token = next_token
        self.context_limit = CONTEXT_LIMIT
        self.slot_capacity = 1024
        self.max_budget = tree_pb2.TreeBudget(rows=64, depth=32)
        self.sessions: list[TeacherSessionRecord] = []
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.faults: list[str] = []
        self.on_open: Callable[[TeacherSessionRecord, grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.on_verify: Callable[[TeacherSessionRecord, grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.timings = teacher_pb2.TeacherTimings(queue_us=1, forward_us=20, commit_us=3, total_us=30)

    @property
    def fingerprint(self) -> model_pb2.ModelFingerprint:
        """As announced."""
        return model_pb2.ModelFingerprint(
            model="scripted",
            tokenizer_sha256=tokenizer_sha256(TOKENIZER_JSON),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            feature_width=FEATURE_WIDTH,
            context_limit=self.context_limit,
        )

    async def GetModel(self, request, context):  # noqa: N802
        return teacher_pb2.GetModelResponse(
            fingerprint=self.fingerprint,
            numerics=model_pb2.TeacherNumerics(dtype="float32", policy="bitwise", mode="reference"),
            max_budget=self.max_budget,
            slot_capacity=self.slot_capacity,
        )

    async def GetTokenizer(self, request, context):  # noqa: N802
        return teacher_pb2.GetTokenizerResponse(
            tokenizer_json=TOKENIZER_JSON, chat_template=CHAT_TEMPLATE, special_tokens={"eos_token": "<|im_end|>"}
        )

    async def Verify(self, requests, context) -> AsyncIterator[teacher_pb2.VerifyResponse]:  # noqa: N802
        first = await anext(requests)
        record = TeacherSessionRecord(first.open, first.epoch, dict(context.invocation_metadata()))
        self.sessions.append(record)
        self.active += 1
        self.idle.clear()
        try:
            async for response in self._session(record, requests, context):
                yield response
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    async def _session(self, record, requests, context) -> AsyncIterator[teacher_pb2.VerifyResponse]:
        epoch, opening = record.epoch, record.open
        history = list(opening.prompt_token_ids)
        self._check(epoch != 0, "epoch is 0")
        self._check(len(history) < self.context_limit, "prompt over the limit")
        needed = len(history) + opening.max_new_tokens + opening.max_budget.rows
        self._check(needed <= self.slot_capacity, f"{needed} tokens in a slot of {self.slot_capacity}")
        self._check(opening.max_new_tokens >= 1, "nothing to generate")
        if self.on_open is not None:
            await self.on_open(record, context)
        yield teacher_pb2.VerifyResponse(
            epoch=epoch,
            opened=teacher_pb2.TeacherSessionOpened(
                fingerprint=self.fingerprint,
                numerics=model_pb2.TeacherNumerics(dtype="float32", policy="bitwise", mode="reference"),
            ),
        )
        if opening.want_features:
            for start in range(0, len(history), 2):
                tokens = history[start : start + 2]
                yield teacher_pb2.VerifyResponse(epoch=epoch, features=features_of(start, tokens))
        yield teacher_pb2.VerifyResponse(
            epoch=epoch,
            prefilled=teacher_pb2.Prefilled(
                next_token_id=self.next_token(history),
                committed_length=len(history),
                margin=0.5,
                timings=self.timings,
            ),
        )
        pending: list[int] = []
        async for request in requests:
            verify = request.verify
            record.rounds.append(verify)
            self._check(request.epoch == epoch, "stale epoch")
            self._check(verify.round == len(record.rounds), f"round {verify.round}, expected {len(record.rounds)}")
            if verify.round == 1:
                self._check(verify.commit == 0, "commit in round 1")
            else:
                self._check(verify.commit < len(pending), f"commit {verify.commit} of {len(pending)}")
                history += pending[: verify.commit + 1]
            self._check(verify.committed_length == len(history), f"{verify.committed_length} != {len(history)}")
            tree = TokenTree(*decode_tree(verify.tree))
            budget = opening.max_budget
            tree.validate(vocab_size=VOCAB_SIZE, max_rows=budget.rows, max_depth=budget.depth)
            deepest = len(history) + int(tree.depth.max())
            self._check(deepest < self.context_limit, f"position {deepest} past the context limit")
            self._check(int(tree.token_ids[0]) == self.next_token(history), "wrong root")
            if self.on_verify is not None:
                await self.on_verify(record, context)
            decided = [
                self.next_token([*history, *(int(tree.token_ids[r]) for r in tree.ancestors[row][: depth + 1])])
                for row, depth in enumerate(tree.depth.tolist())
            ]
            accepted = tree.accept(decided)
            pending = [int(tree.token_ids[row]) for row in [0, *accepted]]
            following = decided[accepted[-1] if accepted else 0]
            yield teacher_pb2.VerifyResponse(
                epoch=epoch,
                verdict=teacher_pb2.Verdict(
                    round=verify.round,
                    accepted_rows=accepted,
                    next_token_id=following,
                    margins=[0.25] * (len(accepted) + 1),
                    features=features_of(len(history), pending) if opening.want_features else None,
                    timings=self.timings,
                ),
            )

    def _check(self, right: bool, fault: str) -> None:
        if not right:
            self.faults.append(fault)


def features_of(start: int, tokens: Sequence[int]) -> tree_pb2.Features:
    """Features that name their tokens."""
    data = b"".join(token.to_bytes(2, "little") * FEATURE_WIDTH for token in tokens)
    return tree_pb2.Features(start=start, count=len(tokens), data=data)


@dataclass
class Asked:
    """What a plan sees. sequence: prompt and answer, the root last. number: of the question, from 0, over all
    sessions. epoch, round: on the wire."""

    number: int
    epoch: int
    round: int
    sequence: list[int]
    rows: int
    depth: int


Planned = TokenTree | tree_pb2.TokenTree | teacher_pb2.Rejection | list[draft_pb2.ProposeResponse]
Plan = Callable[[Asked], Planned]


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Proposes by `plan` (or says whatever messages it gives); `on_propose` runs before and may wait or abort."""

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
        self.calls_of_get_drafters = 0

    async def GetDrafters(self, request, context):  # noqa: N802
        self.calls_of_get_drafters += 1
        return draft_pb2.GetDraftersResponse(drafters=self.drafters, default_drafter=self.drafters[0])

    async def Propose(self, requests, context) -> AsyncIterator[draft_pb2.ProposeResponse]:  # noqa: N802
        self.active += 1
        self.idle.clear()
        try:
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
            self._check(request.epoch == epoch, "stale epoch")
            if request.HasField("features"):
                self._check(request.features.start == len(features), "features do not follow")
                features += [request.features.data[at] for at in range(0, len(request.features.data), 8)]
                self.features = features
                continue
            propose = request.propose
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
            asked = Asked(len(self.asked), epoch, propose.round, list(sequence), budget.rows, budget.depth)
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
