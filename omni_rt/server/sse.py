"""Server-sent events: one `data:` line per JSON object, `[DONE]` at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from litestar import Request as HttpRequest
from litestar.response import Stream as HttpStream

from omni_rt.request import Output
from omni_rt.runtime.stream import Stream
from omni_rt.server.gone import unless_gone

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def data(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


async def response(
    request: HttpRequest[Any, Any, Any], events: AsyncGenerator[bytes, None]
) -> HttpStream:
    """The response that streams `events`. It begins with the first of them: what is raised before
    that still gets a status of its own."""
    first = await unless_gone(request, anext(events))
    return HttpStream(
        _resumed(first, events),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},  # for proxies
        status_code=200,
    )


async def _resumed(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in rest:
            yield event
    finally:
        await rest.aclose()


async def merged(streams: list[Stream]) -> AsyncIterator[tuple[int, Output]]:
    """The outputs of several requests as they come, each with its request's index.

    Raises the first error of any of them.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Output | None]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: Stream) -> None:
        async for output in stream:
            await queue.put((index, output))
        await queue.put((index, None))

    tasks = [asyncio.create_task(pump(k, stream)) for k, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            getter = asyncio.ensure_future(queue.get())
            await asyncio.wait((getter, *tasks), return_when=asyncio.FIRST_COMPLETED)
            failed = [t for t in tasks if t.done() and t.exception()]
            if failed:
                getter.cancel()
                failed[0].result()
            if not getter.done() and all(task.done() for task in tasks) and queue.empty():
                getter.cancel()
                return
            index, item = await getter
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
