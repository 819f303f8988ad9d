"""What the streams to the teacher and to the draft have in common: epochs, metadata, how a call ends.

The stream is the session: its end frees the peer's KV. It knows nothing of what is said on it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc.aio

GOODBYE_SECONDS = 5.0
REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"

Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"  # generic in the stubs only
Metadata = tuple[tuple[str, str], ...]

_goodbyes: set[asyncio.Task[None]] = set()


def new_epoch() -> int:
    """A random non-zero uint64; no peer can take a message of one session for one of another."""
    return secrets.randbelow(2**64 - 1) + 1


def metadata_of(request_id: str, traceparent: str) -> Metadata:
    """What travels with every call of a request: its id, and the W3C trace context when it came with one."""
    pairs = [(REQUEST_ID_KEY, request_id)] if request_id.isascii() else []
    return tuple([*pairs, (TRACEPARENT_KEY, traceparent)] if traceparent else pairs)


def microseconds(seconds: float) -> int:
    """Never negative: two clocks may disagree by a little."""
    return max(0, round(seconds * 1e6))


def say_goodbye(call: Call, half_close: Callable[[], Awaitable[None]] | None = None) -> None:
    """Let the peer end a stream that is done; cancel it when the peer takes too long. Returns at once.

    A session that ends badly is cancelled instead, which the peer notices as early.

    Args:
        call: of which every answer was read.
        half_close: tells the peer that nothing more comes; None: it was told.
    """
    task = asyncio.get_running_loop().create_task(_goodbye(call, half_close))
    _goodbyes.add(task)
    task.add_done_callback(_goodbyes.discard)


async def _goodbye(call: Call, half_close: Callable[[], Awaitable[None]] | None) -> None:
    try:
        async with asyncio.timeout(GOODBYE_SECONDS):
            if half_close is not None:
                await half_close()
            await call.code()
    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    finally:
        call.cancel()
