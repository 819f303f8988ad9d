"""The HTTP front as a process: socket, channel, uvicorn. Its configuration is `http.*`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence

import uvicorn

from eagle_pangu.client.client import GenerationClient
from eagle_pangu.client.retries import RetryPolicy
from eagle_pangu.openai_api.app import application
from eagle_pangu.serving.bootstrap import LISTENING
from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.configuration import SettingsError, load_settings
from eagle_pangu.serving.logs import configure_logging, get_logger
from eagle_pangu.serving.settings import HttpSettings, ServerSettings

PROGRAM = "eagle-pangu-http"

log = get_logger(__name__)


@contextlib.asynccontextmanager
async def server(settings: HttpSettings) -> AsyncIterator[uvicorn.Server]:
    """A server that is ready for `serve(sockets=...)`, with its connection to the orchestrator."""
    connection = ServerSettings(max_message_bytes=settings.max_message_bytes)
    async with (
        GenerationClient(settings.target, connection, retries=RetryPolicy(settings.attempts)) as client,
        channel(settings.target, connection) as health,
    ):
        yield uvicorn.Server(
            uvicorn.Config(
                application(client, health, settings),
                http="h11",  # one implementation, whatever else is installed
                loop="none",
                ws="none",
                lifespan="off",
                log_config=None,  # ours
                access_log=False,  # the middleware writes one line a request, with its id
                server_header=False,
                timeout_graceful_shutdown=settings.drain_seconds,
            )
        )


def listen(settings: HttpSettings) -> socket.socket:
    """The socket to serve; raises OSError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host.strip("[]"), settings.port), family=family, backlog=2048)


def run(settings: HttpSettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit status."""
    try:
        listener = listen(settings)
    except OSError as error:
        log.error("cannot start", reason=f"host, port: cannot listen on {settings.host}:{settings.port}: {error}")
        return 1
    port = listener.getsockname()[1]

    async def serve() -> None:
        async with server(settings) as serving:
            sys.stdout.write(f"{LISTENING} {settings.host}:{port}\n")
            sys.stdout.flush()
            log.info("listening", host=settings.host, port=port, target=settings.target)
            await serving.serve(sockets=[listener])

    # uvicorn drains at the signal and then sends it again, to whatever handled it before: that ends with status 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    asyncio.run(serve())
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the container and of `eagle-pangu http`; exits with 2 on bad settings, 1 when the start fails.

    Args:
        argv: flags; None: those of the process.
    """
    try:
        settings = load_settings(sys.argv[1:] if argv is None else argv, section="http", program=PROGRAM).http
    except SettingsError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        sys.exit(2)
    configure_logging(settings.log_level, PROGRAM)
    sys.exit(run(settings))


if __name__ == "__main__":
    main()
