"""The teacher as a process: builds the engine, wires the parts, starts and drains. Its configuration is `teacher.*`."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio
import torch

from eagle_pangu.serving.bootstrap import StartError, run_service
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.serving.stalls import stall
from eagle_pangu.speculation.checkpoints import CheckpointError, load_checkpoint
from eagle_pangu.speculation.devices import Device, get_device, resolve_dtype
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.invariance import NoInvarianceError
from eagle_pangu.speculation.models import ModelError, resolve_model
from protos.v1 import teacher_pb2_grpc
from teacher_service.executor import Executor
from teacher_service.prefix_cache import PrefixCache
from teacher_service.service import Runtime, TeacherServicer
from teacher_service.slots import Slots

log = get_logger(__name__)


class TeacherService:
    """The `Service` that the bootstrap runs.

    Args:
        settings: the teacher's section.
        build: makes the engine, on the executor's thread; another one in tests.
    """

    service_names = ("eagle_pangu.v1.TeacherService",)

    def __init__(self, settings: TeacherSettings, build: Callable[[TeacherSettings], Engine] | None = None) -> None:
        self.slots = Slots(settings.slots, settings.queue_limit, settings.queue_seconds)
        self.executor = Executor()
        self._settings = settings
        self._build = build or build_engine
        self._servicer = TeacherServicer()

    def register(self, server: grpc.aio.Server) -> None:
        """See `Service.register`."""
        teacher_pb2_grpc.add_TeacherServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Load and warm the model on the thread that will run it.

        Raises:
            StartError: the model, the device or the numerics asked for cannot be had; names which and why.
        """
        try:
            built = await self.executor.run(self, lambda: self._build(self._settings))
        except (ModelError, CheckpointError, NoInvarianceError) as error:
            raise StartError(str(error)) from error
        prefixes = PrefixCache(self._settings.prefix_cache_tokens)
        self._servicer.runtime = Runtime(built.value, self.executor, self.slots, prefixes, self._settings)

    def hindrance(self) -> str | None:
        """A forward pass that does not come to its end."""
        busy_since = self.executor.heartbeat().busy_since
        return stall(busy_since, self._settings.stall_seconds)

    async def drained(self) -> None:
        """Refuse sessions that wait for a slot; return once the running ones have ended."""
        self.slots.close()
        await self.slots.idle()

    async def stop(self) -> None:
        """End the model's thread."""
        await self.executor.close()


def build_engine(settings: TeacherSettings) -> Engine:
    """A warm engine as configured. Blocking.

    ``dtype = "auto"`` is the device's best; where that keeps no bitwise numerics and none were demanded, float32 takes
    its place, since only there are ids equal in practice under `free` (DESIGN §7).
    """
    try:
        device = get_device(settings.device)
    except (ValueError, RuntimeError) as error:
        raise StartError(str(error)) from error
    threads = device.configure_threads(settings.threads)
    dtype = resolve_dtype(settings.dtype, device)
    engine = _load(settings, device, dtype)
    replaceable = settings.dtype == "auto" and dtype != torch.float32
    if not (replaceable and engine.numerics.degraded_reason):
        engine.warm_up()  # its self-test may find a reason too
    if replaceable and (reason := engine.numerics.degraded_reason):
        log.warning("float32 takes the place of the default dtype", reason=reason)
        del engine  # before the second one is loaded
        engine = _load(settings, device, torch.float32)
        engine.warm_up()
    log.info("model ready", device=device.name, threads=threads, **engine.numerics._asdict())
    return engine


def _load(settings: TeacherSettings, device: Device, dtype: torch.dtype) -> Engine:
    return Engine(
        load_checkpoint(resolve_model(settings.model), dtype, device),
        device,
        mode=settings.mode,
        numerics=settings.numerics,
        slot_capacity=settings.slot_capacity,
        max_rows=settings.max_rows,
        chunk=settings.prefill_chunk,
        branch=settings.branch,
    )


def main() -> None:
    """Entry point of the container and of `eagle-pangu up`."""
    run_service("eagle-pangu-teacher", lambda settings: TeacherService(settings.teacher), "teacher")


if __name__ == "__main__":
    main()
