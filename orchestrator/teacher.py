"""One session of the teacher, seen from the client: open and prefill, then one verification a round.

It keeps the session's own numbers (epoch, round, committed length) so that nobody else can get them wrong. What to do
when the teacher is lost is decided elsewhere (`orchestrator.failover`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import grpc.aio

from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.tree import TokenTree
from orchestrator.counters import Batch, PartTimes
from orchestrator.sessions import Call, Metadata, microseconds, new_epoch, say_goodbye
from orchestrator.teacher_errors import TeacherError, TeacherLostError, meaning_of
from protos.codec import encode_tree
from protos.v1 import model_pb2, sampling_pb2, teacher_pb2, teacher_pb2_grpc, tree_pb2


@dataclass(frozen=True)
class TeacherOpening:
    """What a session opens with; fields as in OpenTeacherSession.

    metadata: of the call. answer_seconds: longest silence while an answer is awaited. on_features: called with every
    Features message, in order, before the answer it belongs to is returned. answer_start: None: all of the prompt is
    prompt. logprobs, prompt_logprobs: None: none at all.
    """

    request_id: str
    fingerprint: model_pb2.ModelFingerprint
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    rows: int
    depth: int
    on_features: Callable[[tree_pb2.Features], None]
    answer_seconds: float
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    answer_start: int | None = None
    metadata: Metadata = ()
    want_features: bool = False


class FirstToken(NamedTuple):
    """The answer token that prefill decided, and what it told of the prompt.

    margin: in logits. logprobs: one or none. times: of the call. batch: of the last pass. cached_tokens: of the prompt,
    which were not read. prompt_logprobs: of the prompt's tokens from the second on where they are wanted, else none.
    """

    token_id: int
    margin: float
    logprobs: list[sampling_pb2.TokenLogprobs]
    times: PartTimes
    batch: Batch
    cached_tokens: int
    prompt_logprobs: list[sampling_pb2.TokenLogprobs]


class Verdict(NamedTuple):
    """The teacher's answer to a round.

    accepted_rows: in path order, root left out. next_token_id: after the last of them. margins: [accepted + 1], in
    logits. logprobs: as many where they are wanted, or none. times, batch: of the call.
    """

    accepted_rows: list[int]
    next_token_id: int
    margins: list[float]
    logprobs: list[sampling_pb2.TokenLogprobs]
    times: PartTimes
    batch: Batch


class TeacherSession:
    """One stream. Use it from one task; close it whatever happens.

    Attributes:
        epoch: Of this session.
        committed_length: Tokens whose KV is final at the teacher, as of the last message sent.
        numerics: How this teacher computes; set once `prefill` returns.
        advised_rows: Drafted rows that pay in the next round, as the last answer said; None: all that were opened for.
    """

    def __init__(
        self,
        stub: teacher_pb2_grpc.TeacherServiceAsyncStub,
        opening: TeacherOpening,
        *,
        timeout: float | None,
        wait_for_ready: bool,
    ) -> None:
        self.epoch = new_epoch()
        self.committed_length = len(opening.prompt_token_ids)
        self.numerics = model_pb2.TeacherNumerics()
        self.advised_rows: int | None = None
        self._opening = opening
        self._round = 0
        self._prompt_logprobs: list[sampling_pb2.TokenLogprobs] = []
        self._call: Call = stub.Verify(timeout=timeout, metadata=opening.metadata, wait_for_ready=wait_for_ready)

    async def connected(self) -> None:
        """Return once a teacher has the call; with `wait_for_ready` that may take until there is one.

        Raises:
            TeacherLostError: another try may succeed.
            DeadlineExceededError: the request's own time is over.
        """
        try:
            await self._call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            raise meaning_of(error) from error

    async def prefill(self) -> FirstToken:
        """Open, and read the prompt.

        Raises:
            TeacherLostError: another try may succeed.
            ResourceExhaustedError: no slot.
            TeacherChangedError: it serves another model now.
            DeadlineExceededError: the request's own time is over.
        """
        opening = self._opening
        message = teacher_pb2.OpenTeacherSession(
            request_id=opening.request_id,
            fingerprint=opening.fingerprint,
            prompt_token_ids=opening.prompt_token_ids,
            max_new_tokens=opening.max_new_tokens,
            max_budget=tree_pb2.TreeBudget(rows=opening.rows, depth=opening.depth),
            want_features=opening.want_features,
            sampling=_sampling(opening.sampling),
            logprobs=opening.logprobs,
            prompt_logprobs=opening.prompt_logprobs,
            priority=opening.priority,
            answer_start=opening.answer_start,
        )
        answer, seconds = await self._ask(teacher_pb2.VerifyRequest(epoch=self.epoch, open=message))
        if answer.WhichOneof("message") != "prefilled":
            raise TeacherError(f"expected `prefilled`, got {answer.WhichOneof('message')}")
        prefilled = answer.prefilled
        if prefilled.committed_length != self.committed_length:
            raise TeacherError(f"prefilled {prefilled.committed_length} of {self.committed_length} tokens")
        wanted = 0 if opening.prompt_logprobs is None else self.committed_length - 1
        if len(self._prompt_logprobs) != wanted:
            raise TeacherError(f"log-probabilities of {len(self._prompt_logprobs)} prompt tokens, expected {wanted}")
        self.advised_rows = prefilled.advised_rows if prefilled.HasField("advised_rows") else None
        return FirstToken(
            prefilled.next_token_id,
            prefilled.margin,
            [prefilled.logprobs] if prefilled.HasField("logprobs") else [],
            _times(prefilled.timings, seconds),
            _batch(prefilled.timings),
            prefilled.cached_tokens,
            self._prompt_logprobs,
        )

    async def verify(self, tree: TokenTree, commit: int) -> Verdict:
        """One round.

        Args:
            tree: its root is the token after the committed ones, once `commit` is applied.
            commit: accepted rows of the round before that stay in the answer; 0 in the first round.

        Raises:
            TeacherLostError: the round was not answered; also when it was refused.
            DeadlineExceededError: the request's own time is over.
        """
        if self._round:
            self.committed_length += commit + 1
        self._round += 1
        message = teacher_pb2.VerifyTree(
            round=self._round,
            committed_length=self.committed_length,
            commit=commit,
            tree=encode_tree(tree.token_ids, tree.parents, tree.scores),
        )
        answer, seconds = await self._ask(teacher_pb2.VerifyRequest(epoch=self.epoch, verify=message))
        if answer.WhichOneof("message") == "rejection":
            refusal = answer.rejection
            raise TeacherLostError(f"round {self._round} refused: {refusal.field}: {refusal.reason}")
        verdict = answer.verdict
        if answer.WhichOneof("message") != "verdict" or verdict.round != self._round:
            raise TeacherError(f"expected the verdict of round {self._round}, got {answer.WhichOneof('message')}")
        accepted = list(verdict.accepted_rows)
        _require_path(accepted, tree)
        if verdict.HasField("features"):
            self._opening.on_features(verdict.features)
        self.advised_rows = verdict.advised_rows if verdict.HasField("advised_rows") else None
        return Verdict(
            accepted,
            verdict.next_token_id,
            list(verdict.margins),
            list(verdict.logprobs),
            _times(verdict.timings, seconds),
            _batch(verdict.timings),
        )

    def close(self, *, graceful: bool) -> None:
        """End the session, and free its slot. graceful: the request is done; otherwise cancel."""
        if graceful:
            say_goodbye(self._call, self._call.done_writing)
        else:
            self._call.cancel()

    async def _ask(self, message: teacher_pb2.VerifyRequest) -> tuple[teacher_pb2.VerifyResponse, float]:
        """The answer, and the seconds it took; what comes before it is dealt with on the way."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._opening.answer_seconds) as silence:
                with suppress(asyncio.InvalidStateError):  # the stream is over; reading tells why
                    await self._call.write(message)
                async for answer in self._call:
                    if answer.epoch != self.epoch:
                        continue
                    silence.reschedule(asyncio.get_running_loop().time() + self._opening.answer_seconds)
                    kind = answer.WhichOneof("message")
                    if kind == "opened":
                        self.numerics = answer.opened.numerics
                    elif kind == "features":
                        self._opening.on_features(answer.features)
                    elif kind == "prompt_logprobs":
                        self._take_prompt_logprobs(answer.prompt_logprobs)
                    elif kind != "reading":  # a sign of life
                        return answer, time.perf_counter() - started
                raise TeacherLostError("the teacher ended the session")
        except TimeoutError as error:
            raise TeacherLostError(f"silent for {self._opening.answer_seconds:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise meaning_of(error) from error

    def _take_prompt_logprobs(self, message: teacher_pb2.PromptLogprobs) -> None:
        expected = len(self._prompt_logprobs) + 1
        if message.start != expected:
            raise TeacherError(f"log-probabilities of the prompt from position {message.start}, expected {expected}")
        self._prompt_logprobs.extend(message.tokens)


def _sampling(parameters: SamplingParameters) -> sampling_pb2.Sampling:
    fields = asdict(parameters)
    biases = parameters.logit_bias
    fields["logit_bias"] = [sampling_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in biases]
    fields["bad_words"] = [sampling_pb2.TokenSequence(token_ids=word) for word in fields["bad_words"]]
    return sampling_pb2.Sampling(**fields)


def _require_path(rows: Sequence[int], tree: TokenTree) -> None:
    above = 0
    for row in rows:
        if not 0 < row < tree.rows or tree.parents[row] != above:
            raise TeacherError(f"accepted rows {list(rows)} are no path of the tree")
        above = row


def _times(timings: teacher_pb2.TeacherTimings, seconds: float) -> PartTimes:
    return PartTimes(
        wire_us=max(0, microseconds(seconds) - timings.total_us),
        queue_us=timings.queue_us,
        teacher_us=timings.forward_us,
        commit_us=timings.commit_us,
    )


def _batch(timings: teacher_pb2.TeacherTimings) -> Batch:
    return Batch(timings.batch_sessions, timings.batch_rows, timings.realign_us)
