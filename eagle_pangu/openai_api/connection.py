"""Work that ends when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Run `work` to its end; cancel it, and the gRPC call within, when the client disconnects first.

    Args:
        work: whatever answers the request; its body has been read.
        receive: of the request; nothing else may read from it meanwhile.

    Raises:
        ClientDisconnect: nobody is left to answer.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
