"""Structured logs: one JSON object a line on stderr, ours and every library's through the same chain.

What is bound with `structlog.contextvars.bind_contextvars(request_id=...)` appears in each line of that call. Prompt
text is never logged here; the trace has its own file and its own switch.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, cast

import structlog
from structlog.typing import Processor

Level = Literal["debug", "info", "warning", "error"]

_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
)


def configure_logging(level: Level, service: str) -> None:
    """Send all logs of this process to stderr as JSON.

    Args:
        level: Lowest level written.
        service: Written as `service` in every line.
    """

    def add_service(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("service", service)
        return event

    chain: list[Processor] = [*_SHARED, add_service]
    structlog.configure(
        processors=[*chain, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=chain,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; `name` is written as `logger`. Cheap, and safe to make at import: it reads the configuration later."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(name))
