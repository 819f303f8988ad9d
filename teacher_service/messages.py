"""Between the messages of teacher.proto and the session's plain values; the only module here that knows both.

It checks the fingerprint, which is a message on both sides, and that what must be there is; the other rules are
`Opening`'s and `Session`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np

from eagle_pangu.serving.errors import FailedPreconditionError
from eagle_pangu.speculation.checkpoints import Checkpoint
from eagle_pangu.speculation.parameters import SamplingParameters
from eagle_pangu.speculation.sampling import LogProbabilities
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import BFLOAT16_BYTES, decode_sampling, decode_tree, encode_features, fingerprint_differences
from protos.errors import InvalidFieldError, StaleMessageError
from protos.v1 import model_pb2, sampling_pb2, teacher_pb2, tree_pb2
from teacher_service.opening import Opening
from teacher_service.replies import FeatureRows, PromptLogprobs, Verdict
from teacher_service.round import Round

OVERHEAD_BYTES = 1024  # of a message around its features or log-probabilities
TOKEN_OVERHEAD_BYTES = 4  # of one token's log-probabilities in their list


def fingerprint_of(checkpoint: Checkpoint) -> model_pb2.ModelFingerprint:
    """What the teacher says it is."""
    return model_pb2.ModelFingerprint(
        model=checkpoint.name,
        tokenizer_sha256=checkpoint.tokenizer.sha256,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        feature_width=checkpoint.feature_width,
        context_limit=checkpoint.context_limit,
    )


def require_same_ids(ours: model_pb2.ModelFingerprint, theirs: model_pb2.ModelFingerprint) -> None:
    """Refuse an opener that means another model.

    Raises:
        FailedPreconditionError: names both sides and every field that differs.
    """
    differences = fingerprint_differences(ours, theirs)
    if differences:
        raise FailedPreconditionError(
            f"open.fingerprint: the teacher serves {ours.model!r}, the opener expects {theirs.model!r} "
            f"(teacher / opener): {'; '.join(differences)}"
        )


def read_opening(epoch: int, message: teacher_pb2.OpenTeacherSession) -> Opening:
    """The opening as it came, unchecked.

    Raises:
        InvalidFieldError: there is no budget, which is not the same as an empty one.
    """
    if not message.HasField("max_budget"):
        raise InvalidFieldError("open.max_budget", "expected a budget (rows 0 and depth 0: teacher-only), got nothing")
    return Opening(
        epoch=epoch,
        request_id=message.request_id,
        prompt=np.array(message.prompt_token_ids, dtype=np.int64),
        max_new_tokens=message.max_new_tokens,
        max_rows=message.max_budget.rows,
        max_depth=message.max_budget.depth,
        want_features=message.want_features,
        sampling=_read_sampling(message.sampling),
        answer_start=message.answer_start if message.HasField("answer_start") else len(message.prompt_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        priority=message.priority,
    )


def _read_sampling(message: sampling_pb2.Sampling) -> SamplingParameters:
    """As it came, unchecked; an absent message holds the defaults."""
    return SamplingParameters(
        **decode_sampling(message),
        seed=message.seed,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        end_token_ids=tuple(message.end_token_ids),
    )


def read_round(request: teacher_pb2.VerifyRequest) -> Round:
    """The round as it came, unchecked.

    Raises:
        InvalidFieldError: the request holds no round.
    """
    if request.WhichOneof("message") != "verify":
        raise InvalidFieldError("message", "expected `verify`, got nothing")
    message = request.verify
    tree = TokenTree(*decode_tree(message.tree))
    return Round(request.epoch, message.round, message.committed_length, message.commit, tree)


def write_verdict(
    verdict: Verdict, timings: teacher_pb2.TeacherTimings, advised_rows: int | None
) -> teacher_pb2.Verdict:
    """The message of a verdict."""
    return teacher_pb2.Verdict(
        round=verdict.round,
        accepted_rows=verdict.accepted_rows,
        next_token_id=verdict.next_token_id,
        margins=verdict.margins.tolist(),
        features=None if verdict.features is None else encode_features(*verdict.features),
        timings=timings,
        logprobs=write_logprobs(verdict.logprobs),
        advised_rows=advised_rows,
    )


def write_logprobs(found: LogProbabilities | None) -> list[sampling_pb2.TokenLogprobs]:
    """One message a token; none where none were wanted."""
    if found is None:
        return []
    return [
        sampling_pb2.TokenLogprobs(logprob=logprob, top_token_ids=ids, top_logprobs=top)
        for logprob, ids, top in zip(*(values.tolist() for values in found), strict=True)
    ]


def write_features(features: FeatureRows, max_message_bytes: int) -> Iterator[tree_pb2.Features]:
    """Features in as many messages as the message limit asks for; one, with the default limits."""
    count, width = features.bits.shape
    step = max(1, (max_message_bytes - OVERHEAD_BYTES) // (width * BFLOAT16_BYTES))
    for start in range(0, count, step):
        yield encode_features(features.start + start, features.bits[start : start + step])


def write_prompt_logprobs(found: PromptLogprobs, max_message_bytes: int) -> Iterator[teacher_pb2.PromptLogprobs]:
    """Log-probabilities in as many messages as the message limit asks for; one, with the default limits."""
    tokens = write_logprobs(found.found)
    largest = max(token.ByteSize() for token in tokens) + TOKEN_OVERHEAD_BYTES
    step = max(1, (max_message_bytes - OVERHEAD_BYTES) // largest)
    for start in range(0, len(tokens), step):
        yield teacher_pb2.PromptLogprobs(start=found.start + start, tokens=tokens[start : start + step])


def write_rejection(round_number: int, error: InvalidFieldError | StaleMessageError) -> teacher_pb2.Rejection:
    """The message that refuses a round."""
    stale = isinstance(error, StaleMessageError)
    code = grpc.StatusCode.FAILED_PRECONDITION if stale else grpc.StatusCode.INVALID_ARGUMENT
    return teacher_pb2.Rejection(
        round=round_number,
        code=code.value[0],
        field=error.field,
        row=error.row if isinstance(error, InvalidFieldError) else None,
        reason=error.reason,
    )
