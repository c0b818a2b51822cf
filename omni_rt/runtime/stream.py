"""What a caller of `submit` holds: the outputs of one request, in order, as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from omni_rt.errors import OmniError
from omni_rt.request import Audio, Data, Image, Output, Progress, Text
from omni_rt.runtime.effects import Delivery
from omni_rt.wire.messages import Chunk, TextPiece
from omni_rt.wire.tensors import Block, Inline


class Owner(Protocol):
    """What a stream needs of the runtime."""

    def read_block(self, request_id: str, ref: Block) -> bytes:
        """Copy a delivered block and give its lease back."""
        ...

    def cancel(self, request_id: str) -> bool: ...

    def client_gone(self, request_id: str) -> None: ...


class Mailbox:
    """Deliveries between the runtime, which fills it, and the stream, which empties it."""

    def __init__(self) -> None:
        self.items: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def push(self, delivery: Delivery) -> None:
        self.items.append(delivery)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        while not self.items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class Stream:
    """An async iterator over the outputs of one request; the last one is `Done`.

    Raises the request's `OmniError` where it failed. Leave it early and the request is cancelled:
    with `async with`, `aclose()`, or by dropping the last reference. A block stays in its stage's
    arena until it is taken here, so a slow reader slows its own request down and nobody else's.
    """

    def __init__(
        self,
        request_id: str,
        owner: Owner,
        mailbox: Mailbox,
        soon: Callable[[Callable[[str], None], str], object],
    ) -> None:
        self.id = request_id
        self._owner = owner
        self._mailbox = mailbox
        self._soon = soon  # schedules a call on the runtime's loop from anywhere
        self._over = False

    def __repr__(self) -> str:
        return f"<Stream {self.id} {'over' if self._over else 'open'}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._over:
            raise StopAsyncIteration
        if not self._mailbox.items:
            await self._mailbox.wait()
        delivery = self._mailbox.items.popleft()
        item = delivery.item
        if isinstance(item, Chunk):
            return self._output(delivery.output, item)
        if isinstance(item, Progress):
            return item
        self._finish()
        if isinstance(item, OmniError):
            raise item
        return item

    def cancel(self) -> bool:
        """Cancel the request; the iterator then raises `Cancelled`. False if it is over."""
        return self._owner.cancel(self.id)

    async def aclose(self) -> None:
        """Cancel the request if it is not over and give back what was not taken."""
        if not self._over:
            self._finish()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._over:
            self._soon(self._owner.client_gone, self.id)

    def _finish(self) -> None:
        self._over = True
        self._owner.client_gone(self.id)

    def _output(self, name: str, chunk: Chunk) -> Output:
        data = chunk.data
        if isinstance(data, TextPiece):
            return Text(
                data.text,
                data.tokens,
                name,
                data.index,
                data.logprobs,
                data.calls,
                data.finish_reason,
            )
        if isinstance(data, Inline):
            content = data.data
        elif isinstance(data, Block):
            content = self._owner.read_block(self.id, data)
        else:
            raise OmniError(f"output {name} came as {type(data).__name__}, which main cannot read")
        meta = chunk.meta or {}
        media_type = str(meta.get("media_type", ""))
        if media_type.startswith("image/"):
            return Image(content, media_type, meta["width"], meta["height"], meta["seed"], name)
        if media_type.startswith("audio/"):
            return Audio(content, media_type, meta["sample_rate"], chunk.seq, chunk.last, name)
        return Data(content, data.dtype, data.shape, name, meta.get("index", 0))
