"""A teacher that follows a script, as a real gRPC service; whatever breaks the contract is kept in `faults`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_tree
from protos.fingerprint import tokenizer_sha256
from protos.v1 import model_pb2, sampling_pb2, teacher_pb2, teacher_pb2_grpc, tree_pb2
from tests.orchestrator.scripted.language import (
    CHAT_TEMPLATE,
    CONTEXT_LIMIT,
    EOS,
    FEATURE_WIDTH,
    TOKENIZER_JSON,
    VOCAB_SIZE,
    NextToken,
    scrambled,
)


@dataclass
class TeacherSessionRecord:
    """What one teacher session was asked."""

    open: teacher_pb2.OpenTeacherSession
    epoch: int
    metadata: dict[str, str]
    rounds: list[teacher_pb2.VerifyTree] = field(default_factory=list)


class ScriptedTeacher(teacher_pb2_grpc.TeacherServiceServicer):
    """Decides by `next_token`; `on_verify` runs before each verdict and may wait, abort or raise.

    Sessions wait for one of `slots`. What was prefilled before is cached, but for the last token of a prompt. With
    `samples` a session that samples decides as if its seed came before the prompt. `advise`: rows for the round of a
    number, from 1.
    """

    def __init__(self, next_token: NextToken = scrambled) -> None:
        self.next_token = next_token
        self.context_limit = CONTEXT_LIMIT
        self.slot_capacity = 1024
        self.max_budget = tree_pb2.TreeBudget(rows=64, depth=32)
        self.numerics = model_pb2.TeacherNumerics(dtype="float32", policy="bitwise", mode="reference")
        self.slots = asyncio.Semaphore(1024)
        self.samples = False
        self.prefilled: list[list[int]] = []
        self.sessions: list[TeacherSessionRecord] = []
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.faults: list[str] = []
        self.on_open: Callable[[TeacherSessionRecord, grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.on_verify: Callable[[TeacherSessionRecord, grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.advise: Callable[[int], int | None] = lambda number: None
        self.signs_of_life: Sequence[float] = ()  # seconds before each, while a prompt is read
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
            numerics=self.numerics,
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
            async with self.slots:
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
        self._check(opening.logprobs <= 20, f"{opening.logprobs} logprobs")
        self._check(opening.prompt_logprobs <= 20, f"{opening.prompt_logprobs} prompt_logprobs")
        self._check(-100 <= opening.priority <= 100, f"priority {opening.priority}")
        prefix = [opening.sampling.seed] if self.samples and opening.sampling.temperature > 0 else []
        if self.on_open is not None:
            await self.on_open(record, context)
        yield teacher_pb2.VerifyResponse(
            epoch=epoch,
            opened=teacher_pb2.TeacherSessionOpened(
                fingerprint=self.fingerprint,
                numerics=self.numerics,
            ),
        )
        for seconds in self.signs_of_life:
            await asyncio.sleep(seconds)
            yield teacher_pb2.VerifyResponse(epoch=epoch, reading=teacher_pb2.Reading(committed_length=0))
        if opening.want_features:
            for start in range(0, len(history), 2):
                tokens = history[start : start + 2]
                yield teacher_pb2.VerifyResponse(epoch=epoch, features=features_of(start, tokens))
        if opening.HasField("prompt_logprobs"):
            for message in prompt_logprobs_of(history, opening.prompt_logprobs):
                yield teacher_pb2.VerifyResponse(epoch=epoch, prompt_logprobs=message)
        first = self.next_token([*prefix, *history])
        yield teacher_pb2.VerifyResponse(
            epoch=epoch,
            prefilled=teacher_pb2.Prefilled(
                next_token_id=first,
                committed_length=len(history),
                margin=0.5,
                timings=self.timings,
                logprobs=logprobs_of(history, first, opening.logprobs) if opening.HasField("logprobs") else None,
                cached_tokens=0 if opening.HasField("prompt_logprobs") else self._cached(history),
                advised_rows=self.advise(1),
            ),
        )
        self.prefilled.append(list(history))
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
            self._check(int(tree.token_ids[0]) == self.next_token([*prefix, *history]), "wrong root")
            if self.on_verify is not None:
                await self.on_verify(record, context)
            before = [
                [*history, *(int(tree.token_ids[r]) for r in tree.ancestors[row][: depth + 1])]
                for row, depth in enumerate(tree.depth.tolist())
            ]
            decided = [self.next_token([*prefix, *each]) for each in before]
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
                    advised_rows=self.advise(verify.round + 1),
                    logprobs=[logprobs_of(before[row], decided[row], opening.logprobs) for row in [0, *accepted]]
                    if opening.HasField("logprobs")
                    else [],
                ),
            )

    def _cached(self, prompt: list[int]) -> int:
        """Tokens that an earlier session had read too."""
        return max((_common(prompt[:-1], earlier) for earlier in self.prefilled), default=0)

    def _check(self, right: bool, fault: str) -> None:
        if not right:
            self.faults.append(fault)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    same = (ours == theirs for ours, theirs in zip(one, other, strict=False))
    return sum(itertools.takewhile(bool, same))


def logprobs_of(history: Sequence[int], token: int, top: int) -> sampling_pb2.TokenLogprobs:
    """Log-probabilities that name their place and token: a quarter less a token of history; best are the next ids."""
    return sampling_pb2.TokenLogprobs(
        logprob=-len(history) / 4,
        top_token_ids=[(token + rank) % VOCAB_SIZE for rank in range(top)],
        top_logprobs=[-rank / 4 for rank in range(top)],
    )


def prompt_logprobs_of(prompt: Sequence[int], top: int) -> list[teacher_pb2.PromptLogprobs]:
    """Those of a prompt, two tokens a message."""
    tokens = [logprobs_of(prompt[:at], prompt[at], top) for at in range(1, len(prompt))]
    return [
        teacher_pb2.PromptLogprobs(start=start + 1, tokens=tokens[start : start + 2])
        for start in range(0, len(tokens), 2)
    ]


def features_of(start: int, tokens: Sequence[int]) -> tree_pb2.Features:
    """Features that name their tokens."""
    data = b"".join(token.to_bytes(2, "little") * FEATURE_WIDTH for token in tokens)
    return tree_pb2.Features(start=start, count=len(tokens), data=data)
