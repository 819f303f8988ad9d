"""Between this service's messages and its plain values; the only module here that reads or writes a .proto field.

It checks what only a message can get wrong; the rules of the values are their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import grpc

from draft_service.drafters.base import Budget, Drafter, ModelIdentity
from draft_service.opening import Opening
from draft_service.session import FeatureRows, Question
from eagle_pangu.serving.errors import FailedPreconditionError
from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_features, encode_tree, fingerprint_differences
from protos.errors import InvalidFieldError, StaleMessageError
from protos.v1 import draft_pb2, model_pb2, teacher_pb2, tree_pb2

if TYPE_CHECKING:
    from eagle_pangu.speculation.buckets import SeenShapes


def write_shapes(drafters: Mapping[str, SeenShapes | None]) -> dict[str, teacher_pb2.ShapeStats]:
    """By drafter, of those whose shapes cost something."""
    return {
        name: teacher_pb2.ShapeStats(warmed=seen.warmed, met_later=seen.met_later)
        for name, seen in drafters.items()
        if seen is not None
    }


def read_opening(epoch: int, message: draft_pb2.OpenDraftSession, default_drafter: str) -> Opening:
    """The opening of a session, its values unchecked.

    Raises:
        InvalidFieldError: no budget.
    """
    if not message.HasField("max_budget"):
        raise InvalidFieldError("open.max_budget", "expected a budget, got nothing")
    return Opening(
        epoch=epoch,
        request_id=message.request_id,
        drafter=message.drafter or default_drafter,
        prompt=list(message.prompt_token_ids),
        max_budget=_read_budget(message.max_budget),
        vocab_size=message.teacher.vocab_size,
        context_limit=message.teacher.context_limit,
        feature_width=message.teacher.feature_width,
    )


def read_question(message: draft_pb2.ProposeTree) -> Question:
    """The question of a round, its values unchecked.

    Raises:
        InvalidFieldError: no budget.
    """
    if not message.HasField("budget"):
        raise InvalidFieldError("budget", "expected a budget, got nothing")
    return Question(
        message.round, message.committed_length, list(message.appended_token_ids), _read_budget(message.budget)
    )


def read_features(message: tree_pb2.Features, feature_width: int) -> FeatureRows:
    """Features of consecutive tokens.

    Raises:
        InvalidFieldError: another width, or bytes that are not so many rows.
    """
    return FeatureRows(message.start, decode_features(message, feature_width))


def require_same_ids(identity: ModelIdentity, teacher: model_pb2.ModelFingerprint) -> None:
    """Refuse a teacher whose ids mean something else than the draft model's, or whose features it cannot read.

    Raises:
        FailedPreconditionError: names both sides and every field that differs.
    """
    ours = model_pb2.ModelFingerprint(
        model=identity.model,
        tokenizer_sha256=identity.tokenizer_sha256,
        vocab_size=identity.vocab_size,
        eos_token_ids=identity.eos_token_ids,
    )
    differences = fingerprint_differences(ours, teacher)
    if identity.feature_width not in (0, teacher.feature_width):
        differences.append(f"feature_width: {identity.feature_width} / {teacher.feature_width}")
    if differences:
        raise FailedPreconditionError(
            f"open.teacher: the draft model is {ours.model!r}, the teacher {teacher.model!r} "
            f"(draft / teacher): {'; '.join(differences)}"
        )


def opened(epoch: int, drafter: Drafter[Any, Any]) -> draft_pb2.ProposeResponse:
    """The answer to an open."""
    message = draft_pb2.DraftSessionOpened(
        drafter=drafter.name, needs_features=drafter.needs_features, context_limit=drafter.context_limit
    )
    return draft_pb2.ProposeResponse(epoch=epoch, opened=message)


def proposal(epoch: int, round_number: int, tree: TokenTree, draft_us: int, total_us: int) -> draft_pb2.ProposeResponse:
    """The answer to a propose; durations in microseconds."""
    message = draft_pb2.Proposal(
        round=round_number,
        tree=encode_tree(tree.token_ids, tree.parents, tree.scores),
        draft_us=draft_us,
        total_us=total_us,
    )
    return draft_pb2.ProposeResponse(epoch=epoch, proposal=message)


def rejection(epoch: int, round_number: int, error: InvalidFieldError | StaleMessageError) -> draft_pb2.ProposeResponse:
    """The answer to a message that breaks a rule; its round is 0 when it had none."""
    stale = isinstance(error, StaleMessageError)
    code = grpc.StatusCode.FAILED_PRECONDITION if stale else grpc.StatusCode.INVALID_ARGUMENT
    message = teacher_pb2.Rejection(
        round=round_number,
        code=code.value[0],
        field=error.field,
        row=error.row if isinstance(error, InvalidFieldError) else None,
        reason=error.reason,
    )
    return draft_pb2.ProposeResponse(epoch=epoch, rejection=message)


def _read_budget(message: tree_pb2.TreeBudget) -> Budget:
    return Budget(message.rows, message.depth)
