"""A client that goes away stops its request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from litestar import Request as HttpRequest

from omni_rt.errors import Cancelled

_T = TypeVar("_T")


async def unless_gone(request: HttpRequest[Any, Any, Any], work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client disconnects first.

    Raises `Cancelled` then; nobody reads the answer, but the log has it.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: HttpRequest[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
