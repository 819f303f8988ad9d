"""The one way a service starts, serves and drains: grpc.aio, health, reflection, limits, keepalive, signals.

Life of a server: bind the port (a port in use fails here), answer health with NOT_SERVING while the service starts,
SERVING, then on SIGTERM or SIGINT NOT_SERVING at once, wait for running sessions, stop. It knows nothing of what a
service does; new calls outside SERVING are refused with UNAVAILABLE before they reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from eagle_pangu.serving.calls import CallInterceptor
from eagle_pangu.serving.channels import channel, server_options
from eagle_pangu.serving.configuration import SettingsError, load_settings
from eagle_pangu.serving.logs import configure_logging, get_logger
from eagle_pangu.serving.racing import finished_before
from eagle_pangu.serving.settings import SectionName, ServerSettings, Settings
from eagle_pangu.serving.torch_failures import explanation

__all__ = ["Server", "Service", "StartError", "channel", "run_service", "running", "serve"]

HEALTH_SECONDS = 1.0  # between two looks at the service
STOP_GRACE_SECONDS = 0.5  # for answers under way; an open Health.Watch holds the stop for all of it
YOUNG_OBJECTS = 20_000  # allocations between two runs of the collector; by default a teacher's round has two
SAME_SIGNAL_SECONDS = 0.5  # some send a signal to the process and to its group: that is one signal
LISTENING = "listening"  # first word of the line on stdout that names the port
SUPERVISED = "EAGLE_PANGU_SUPERVISED"  # set by a parent that holds our stdin: its end is our SIGTERM

log = get_logger(__name__)


class StartError(Exception):
    """The service cannot start, for a reason that the operator can mend; shown without a traceback."""


class Service(Protocol):
    """What the bootstrap runs."""

    @property
    def service_names(self) -> Sequence[str]:
        """Full gRPC names, for health and reflection, as "eagle_pangu.v1.TeacherService"."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers."""

    async def start(self) -> None:
        """Load what is needed, off the event loop; no call arrives before it returns. May raise StartError."""

    def hindrance(self) -> str | None:
        """Why the work of calls does not get done at the moment, as health tells it; None: it does. Cheap, never fails.

        A service whose work runs on threads of its own looks at their heartbeat: the process may well be alive while
        its model hangs.
        """

    async def drained(self) -> None:
        """Give up what waits for something that may never come; return once no session runs. No new one begins."""

    async def stop(self) -> None:
        """Release everything; called once, after the last call, also when start failed."""


class Server:
    """One service on one port, from binding to stop."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._service = service
        self._settings = settings
        self._calls = CallInterceptor(refusal="the service is starting", write_seconds=settings.write_seconds)
        self._health = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self.port = 0

    async def bind(self) -> int:
        """Listen and answer health with NOT_SERVING; returns the port.

        Raises:
            StartError: the address cannot be bound.
        """
        server = self._server = grpc.aio.server(interceptors=[self._calls], options=server_options(self._settings))
        self._service.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._settings.reflection:
            names = [*self._service.service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, server)
        address = f"{self._settings.host}:{self._settings.port}"
        try:
            self.port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise StartError(f"host, port: cannot listen on {address}; is the port in use?") from error
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        return self.port

    async def start(self) -> None:
        """Start the service, then answer SERVING and take calls."""
        await self._service.start()
        self._calls.refusal = None
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._watch = asyncio.create_task(self._follow_service())

    async def stop(self, drain_seconds: float) -> None:
        """NOT_SERVING at once, wait at most `drain_seconds` for running sessions, stop."""
        self._calls.refusal = "the service is draining"
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(drain_seconds):
                await self._service.drained()
        except TimeoutError:
            log.warning("sessions cut off at the end of the drain time", drain_seconds=drain_seconds)
        finally:
            if self._server is not None:
                await self._server.stop(STOP_GRACE_SECONDS)
            await self._service.stop()

    async def _follow_service(self) -> None:
        """Health as the service finds itself. Calls are taken all the same: the hindrance may pass."""
        before: str | None = None
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            hindrance = self._service.hindrance()
            if hindrance and not before:
                log.error("not serving", reason=hindrance)
                await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            elif before and not hindrance:
                log.info("serving again")
                await self._set_health(health_pb2.HealthCheckResponse.SERVING)
            before = hindrance

    async def _set_health(self, status: int) -> None:
        for name in ("", *self._service.service_names):
            await self._health.set(name, status)


async def serve(service: Service, settings: ServerSettings, *, on_port: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal cuts the drain short.

    Args:
        service: What to run.
        settings: Its section of the configuration.
        on_port: Called with the port once it is bound, before the service has started.

    Raises:
        StartError: the service cannot start.
    """
    first, second = asyncio.Event(), asyncio.Event()
    _on_signals(first, second)
    server = Server(service, settings)
    port = await server.bind()
    log.info("listening", host=settings.host, port=port)
    if on_port is not None:
        on_port(port)
    drain_seconds = settings.drain_seconds
    try:
        if await finished_before(server.start(), first):
            _spare_the_collector()
            log.info("serving", port=port)
            await first.wait()
            log.info("draining", drain_seconds=drain_seconds)
    except BaseException:
        drain_seconds = 0
        raise
    finally:
        if not await finished_before(server.stop(drain_seconds), second):
            log.warning("drain cut short by a second signal")
    log.info("stopped")


@contextlib.asynccontextmanager
async def running(service: Service, settings: ServerSettings | None = None) -> AsyncIterator[int]:
    """A server inside this process, for tests: always on port 0 of the loopback, without signals, without a drain.

    Yields:
        The port.
    """
    settings = (settings or ServerSettings()).model_copy(update={"host": "127.0.0.1", "port": 0})
    server = Server(service, settings)
    try:
        port = await server.bind()
        await server.start()
        yield port
    finally:
        await server.stop(drain_seconds=0)


def run_service(name: str, build: Callable[[Settings], Service], section: SectionName) -> None:
    """The entry point of a container or a child process; exits with 2 on bad settings, 1 when the start fails.

    Writes one line to stdout, ``listening HOST:PORT``; everything else is logged to stderr.

    Args:
        name: Of the command, and of the service in logs.
        build: Makes the service from the whole configuration.
        section: The service's own section; its flags may be given without the section's name.
    """
    try:
        settings = load_settings(sys.argv[1:], section=section, program=name)
    except SettingsError as error:
        sys.stderr.write(f"{name}: {error}\n")
        sys.exit(2)
    own: ServerSettings = getattr(settings, section)
    configure_logging(own.log_level, name)

    def announce(port: int) -> None:
        sys.stdout.write(f"{LISTENING} {own.host}:{port}\n")
        sys.stdout.flush()

    status = 0
    try:
        asyncio.run(serve(build(settings), own, on_port=announce))
    except StartError as error:
        log.error("cannot start", reason=str(error))
        status = 1
    except Exception as error:
        if reason := explanation(error):
            log.error("cannot start", reason=reason)
        else:
            log.exception("failed")
        status = 1
    logging.shutdown()
    # Not sys.exit: the teardown of the interpreter aborts while a thread still loads a model, which cannot be stopped.
    os._exit(status)


def _spare_the_collector() -> None:
    """What was loaded lives as long as the process: the garbage collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _on_signals(first: asyncio.Event, second: asyncio.Event) -> None:
    """Set `first` at the first signal, `second` at a later one."""
    loop = asyncio.get_running_loop()
    first_at = 0.0

    def notify() -> None:
        nonlocal first_at
        if not first.is_set():
            first_at = loop.time()
            first.set()
        elif loop.time() - first_at > SAME_SIGNAL_SECONDS:
            second.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, notify)
    if os.environ.get(SUPERVISED) == "1":

        def read() -> None:
            if not os.read(sys.stdin.fileno(), 1024):
                loop.remove_reader(sys.stdin)
                notify()

        loop.add_reader(sys.stdin, read)
