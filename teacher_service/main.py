"""The teacher as a process: builds the engine, wires the parts, starts and drains. Its configuration is `teacher.*`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio
import torch

from eagle_pangu.serving.batch_worker import BatchWorker
from eagle_pangu.serving.bootstrap import StartError
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.settings import TeacherSettings
from eagle_pangu.serving.stalls import stall
from eagle_pangu.speculation.checkpoints import CheckpointError, load_checkpoint
from eagle_pangu.speculation.devices import Device, get_device, resolve_dtype
from eagle_pangu.speculation.devices.base import AttentionError
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.invariance import NoInvarianceError
from eagle_pangu.speculation.models import ModelError, resolve_model
from eagle_pangu.speculation.plan import whole_blocks
from eagle_pangu.speculation.warm_up import warm_up
from protos.v1 import teacher_pb2_grpc
from teacher_service.advice import Advice
from teacher_service.batching.registry import batching_of
from teacher_service.memory import require_memory
from teacher_service.pass_costs import PassCost, measure_costs
from teacher_service.passes import Passed, Request
from teacher_service.prefix_cache import PrefixCache
from teacher_service.runtime import Runtime
from teacher_service.scheduler import Scheduler
from teacher_service.service import TeacherServicer
from teacher_service.slots import Slots

log = get_logger(__name__)


class TeacherService:
    """The `Service` that the bootstrap runs.

    Args:
        settings: the teacher's section.
        build: makes the engine, on the worker's thread; another one in tests.
        measure: finds what its passes cost, there too; another one in tests.
    """

    service_names = ("eagle_pangu.v1.TeacherService",)

    def __init__(
        self,
        settings: TeacherSettings,
        build: Callable[[TeacherSettings], Engine] | None = None,
        measure: Callable[[Engine], Sequence[PassCost]] = measure_costs,
    ) -> None:
        kv_tokens = whole_blocks(settings.kv_tokens) or settings.slots * whole_blocks(settings.slot_capacity)
        self.slots = Slots(settings.slots, kv_tokens, settings.queue_limit, settings.queue_seconds)
        self.scheduler = Scheduler(batching_of(settings), settings.step_rows, settings.prefill_chunk)
        self.worker: BatchWorker[Request, Passed] = BatchWorker("model", self.scheduler)
        self._settings = settings
        self._build = build or build_engine
        self._measure = measure
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
            await self.worker.run(self, self._load)
        except (ModelError, CheckpointError, NoInvarianceError, AttentionError) as error:
            raise StartError(str(error)) from error

    def _load(self) -> None:
        settings = self._settings
        engine = self._build(settings)
        require_memory(engine, self.slots.kv_tokens, settings)
        shared = settings.slots > 1  # else no pass ever is, and nothing is to be known of it
        advice = Advice(self._measure(engine) if shared else ())
        self.scheduler.begin(engine, advice)
        prefixes = PrefixCache(settings.prefix_cache_tokens)
        self._servicer.runtime = Runtime(engine, self.worker, self.scheduler, advice, self.slots, prefixes, settings)

    def hindrance(self) -> str | None:
        """A forward pass that does not come to its end."""
        busy_since = self.worker.heartbeat().busy_since
        return stall(busy_since, self._settings.stall_seconds)

    async def drained(self) -> None:
        """Refuse sessions that wait for a slot; return once the running ones have ended, their last pass included."""
        self.slots.close()
        await self.slots.idle()

    async def stop(self) -> None:
        """End the model's thread."""
        await self.worker.close()


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
        warm_up(engine)  # its self-test may find a reason too
    if replaceable and (reason := engine.numerics.degraded_reason):
        log.warning("float32 takes the place of the default dtype", reason=reason)
        del engine  # before the second one is loaded
        engine = _load(settings, device, torch.float32)
        warm_up(engine)
    warmed = engine.shapes.warmed if engine.shapes else None
    log.info("model ready", device=device.name, threads=threads, warmed_shapes=warmed, **engine.numerics._asdict())
    if reason := engine.numerics.attention_fallback_reason:
        log.warning("the device's fused attention is not used", attention=engine.numerics.attention, reason=reason)
    return engine


def _load(settings: TeacherSettings, device: Device, dtype: torch.dtype) -> Engine:
    obstacle = _obstacle_to_bits(settings)
    if settings.numerics == "bitwise" and obstacle:
        raise StartError(f"teacher.numerics = bitwise cannot be had with {obstacle}")
    return Engine(
        load_checkpoint(resolve_model(settings.model), dtype, device),
        device,
        mode=settings.mode,
        numerics="free" if obstacle else settings.numerics,
        slot_capacity=settings.slot_capacity,
        max_rows=settings.max_rows,
        chunk=settings.prefill_chunk,
        step_rows=settings.step_rows,
        branch=settings.branch,
        degraded_reason=f"no bitwise numerics with {obstacle}" if settings.numerics == "auto" and obstacle else "",
        attention=settings.attention,
        check_indices=settings.check_indices,
    )


def _obstacle_to_bits(settings: TeacherSettings) -> str:
    """Another setting that `bitwise` numerics cannot be had with; empty: none."""
    if not batching_of(settings).keeps_bits:
        return f"teacher.batching = {settings.batching}"
    if settings.attention != "auto":  # bitwise has an attention of its own
        return f"teacher.attention = {settings.attention}"
    return ""
