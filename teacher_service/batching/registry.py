"""The ways of sharing a pass, by name."""

from __future__ import annotations

from eagle_pangu.serving.settings import TeacherSettings
from teacher_service.batching import Batching
from teacher_service.batching.eqspec import EqSpec
from teacher_service.batching.exspec import ExSpec
from teacher_service.batching.ragged import Ragged


def batching_of(settings: TeacherSettings) -> Batching:
    """As configured."""
    if settings.batching == "eqspec":
        return EqSpec(settings.group_size)
    if settings.batching == "exspec":
        return ExSpec(settings.window, settings.group_size)
    return Ragged()
