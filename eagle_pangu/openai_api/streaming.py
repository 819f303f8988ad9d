"""An answer as server-sent events.

Nothing is sent before the first event is there, so that a refused request gets its HTTP status. An error after that is
an event of its own and ends the stream without [DONE]; a client that wants the whole answer takes [DONE] for its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eagle_pangu.openai_api.connection import while_connected
from eagle_pangu.openai_api.errors import ApiError, internal_error
from eagle_pangu.serving.logs import get_logger

DONE = b"data: [DONE]\n\n"

log = get_logger(__name__)


class EventStream(Response):
    """Sends objects as they come, and [DONE].

    Args:
        objects: one an event; raises ApiError for what the client may read. Closed in every case.
        request_id: named where the client is told of an internal error.
        write_seconds: longest wait for the client to take one event.
    """

    media_type = "text/event-stream"

    def __init__(self, objects: AsyncGenerator[dict[str, Any]], *, request_id: str, write_seconds: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # of the empty body that the base class assumes
        self._objects = objects
        self._request_id = request_id
        self._write_seconds = write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request (ASGI)."""
        await while_connected(self._answer(send), receive)

    async def _answer(self, send: Send) -> None:
        async with aclosing(self._objects) as objects:
            first = await anext(objects)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._write(send, _event(first))
                async for each in objects:
                    await self._write(send, _event(each))
                last = DONE
            except ClientDisconnect:
                raise
            except ApiError as error:
                last = _event(error.body)
            except Exception:
                log.exception("stream failed")
                last = _event(internal_error(self._request_id).body)
            await self._write(send, last, more=False)

    async def _write(self, send: Send, event: bytes, *, more: bool = True) -> None:
        """Flow control holds an event back while the client reads none; it must not hold an answer for ever."""
        try:
            async with asyncio.timeout(self._write_seconds):
                await send({"type": "http.response.body", "body": event, "more_body": more})
        except TimeoutError:
            log.warning("client stalled", write_seconds=self._write_seconds)
            raise ClientDisconnect from None


def _event(content: dict[str, Any]) -> bytes:
    # ASCII: a client that splits lines wherever Unicode has a line break would cut an event in two.
    return b"data: " + json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
