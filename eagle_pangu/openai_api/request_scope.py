"""What surrounds every HTTP request: its id in and out, a line in the log, and an answer where the code fails.

The id is the request id of GenerationService, so one id finds a request in the logs of every process.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_pangu.openai_api.errors import internal_error
from eagle_pangu.openai_api.options import REQUEST_ID_HEADER
from eagle_pangu.serving.logs import get_logger

QUIET_PATHS = ("/health",)
CLIENT_GONE = 499
"""Logged where nobody was left to read a status; the number that proxies use for it."""

log = get_logger(__name__)


class RequestScope:
    """ASGI middleware, outermost; puts `request_id` into the request's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "").strip() or secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception:
            log.exception("request failed")
            if status:
                raise  # the response has begun: the server can only close the connection
            error = internal_error(request_id)
            await JSONResponse(error.body, error.status)(scope, receive, send_with_id)
        finally:
            told: dict[str, Any] = {"method": scope["method"], "path": scope["path"], "status": status}
            tell = log.debug if scope["path"] in QUIET_PATHS else log.info
            tell("request ended", **told, seconds=round(time.monotonic() - started, 4))
