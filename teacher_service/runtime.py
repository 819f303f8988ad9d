"""What the sessions of a teacher share, once its model is warm: the parts that `main` has put together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from eagle_pangu.serving.batch_worker import BatchWorker
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.serving.stalls import stall
from eagle_pangu.speculation.engine import Engine
from protos.v1 import model_pb2, teacher_pb2
from teacher_service import messages
from teacher_service.advice import Advice
from teacher_service.opening import Limits, Opening
from teacher_service.pace import Pace
from teacher_service.passes import Passed, Request
from teacher_service.prefix_cache import PrefixCache
from teacher_service.scheduler import Scheduler
from teacher_service.slots import Slots


@dataclass(frozen=True)
class Runtime:
    """See the module."""

    engine: Engine
    worker: BatchWorker[Request, Passed]
    scheduler: Scheduler
    advice: Advice
    slots: Slots
    prefixes: PrefixCache
    settings: TeacherSettings

    @cached_property
    def fingerprint(self) -> model_pb2.ModelFingerprint:
        """The model served."""
        return messages.fingerprint_of(self.engine.checkpoint)

    @cached_property
    def numerics(self) -> model_pb2.TeacherNumerics:
        """How it computes."""
        return model_pb2.TeacherNumerics(**self.engine.numerics._asdict())

    @property
    def shapes(self) -> teacher_pb2.ShapeStats | None:
        """Distinct ones so far; None where they cost nothing."""
        seen = self.engine.shapes
        return teacher_pb2.ShapeStats(warmed=seen.warmed, met_later=seen.met_later) if seen else None

    def stalls(self) -> str | None:
        """Why the model's work does not get done at the moment; None: it does."""
        return stall(self.worker.heartbeat().busy_since, self.settings.stall_seconds)

    def pace(self, opening: Opening) -> Pace:
        """Of a new session."""
        return Pace(self.advice, self.scheduler, opening.max_rows, advises=self.settings.advise_rows)

    @cached_property
    def limits(self) -> Limits:
        """What a session may ask."""
        return Limits(
            vocab_size=self.engine.checkpoint.vocab_size,
            context_limit=self.engine.checkpoint.context_limit,
            slot_capacity=self.settings.slot_capacity,
            max_rows=self.settings.max_rows,
            max_depth=self.settings.max_depth,
        )
