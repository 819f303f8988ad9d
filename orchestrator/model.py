"""The teacher that this orchestrator speaks for: its fingerprint, its limits, its tokenizer, as fetched from it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import grpc.aio

from eagle_pangu.serving.bootstrap import StartError
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.settings import OrchestratorSettings
from orchestrator.limits import Limits
from orchestrator.tokenizer import Tokenizer
from protos.fingerprint import tokenizer_sha256
from protos.v1 import model_pb2, teacher_pb2, teacher_pb2_grpc, tree_pb2

ATTEMPT_SECONDS = 10.0
RETRY_SECONDS = 0.2
NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

log = get_logger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """One teacher as of its start."""

    fingerprint: model_pb2.ModelFingerprint
    numerics: model_pb2.TeacherNumerics
    max_budget: tree_pb2.TreeBudget
    slot_capacity: int
    tokenizer: Tokenizer

    @property
    def context_limit(self) -> int:
        """Longest sequence, prompt and answer together: the model's, and what a slot holds beside the largest tree.

        The same for every request, so that an answer's length never depends on its drafter or budget.
        """
        return min(self.fingerprint.context_limit, self.slot_capacity - self.max_budget.rows)

    def limits(self, settings: OrchestratorSettings) -> Limits:
        """What requests may ask, and what they get when they do not; `default_drafter` is left empty."""
        rows, depth = self.max_budget.rows, self.max_budget.depth
        return Limits(
            vocab_size=self.fingerprint.vocab_size,
            context_limit=self.context_limit,
            eos_token_ids=tuple(self.fingerprint.eos_token_ids),
            prompt_bytes=settings.prompt_bytes_limit,
            max_tokens=settings.max_tokens_limit,
            answers=settings.n_limit,
            rows=rows,
            depth=depth,
            default_max_tokens=min(settings.default_max_tokens, settings.max_tokens_limit),
            default_rows=min(settings.rows, rows),
            default_depth=min(settings.depth, depth),
        )


async def fetch_model(stub: teacher_pb2_grpc.TeacherServiceAsyncStub) -> ServedModel:
    """The teacher's model; waits until there is a teacher.

    Raises:
        StartError: what answers cannot be used: it is no teacher, or its parts do not fit together.
    """
    while True:
        try:
            model = await stub.GetModel(teacher_pb2.GetModelRequest(), timeout=ATTEMPT_SECONDS, wait_for_ready=True)
            offered = await stub.GetTokenizer(teacher_pb2.GetTokenizerRequest(), timeout=ATTEMPT_SECONDS)
            break
        except grpc.aio.AioRpcError as error:
            if error.code() not in NOT_YET:
                raise StartError(f"teacher: {error.code().name}: {error.details()}") from error
            log.info("waiting for the teacher", reason=error.details())
            await asyncio.sleep(RETRY_SECONDS)
    return await asyncio.to_thread(_assemble, model, offered)


def _assemble(model: teacher_pb2.GetModelResponse, offered: teacher_pb2.GetTokenizerResponse) -> ServedModel:
    fingerprint = model.fingerprint
    try:
        digest = tokenizer_sha256(offered.tokenizer_json)
        tokenizer = Tokenizer.from_message(offered)
    except ValueError as error:
        raise StartError(f"teacher: its tokenizer cannot be read: {error}") from error
    if digest != fingerprint.tokenizer_sha256:
        raise StartError(
            f"teacher: its tokenizer has the hash {digest}, its model {fingerprint.model!r} expects "
            f"{fingerprint.tokenizer_sha256}"
        )
    served = ServedModel(fingerprint, model.numerics, model.max_budget, model.slot_capacity, tokenizer)
    if served.context_limit < 2:
        raise StartError(
            f"teacher: a slot of {model.slot_capacity} tokens has no room beside trees of {model.max_budget.rows} rows"
        )
    return served
