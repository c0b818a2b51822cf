"""Where engines put what they produced: written once into the arena, described in one `Step`.

A task whose output finds no room is held: what it produced waits here in order, in ordinary
memory, and is sent when main frees blocks. See `engine.Outbox` for the contract.
"""

from __future__ import annotations

import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_rt.errors import BadRequest, OmniError, StageFailed
from omni_rt.wire.messages import (
    Chunk,
    Emit,
    Failed,
    Finished,
    Payload,
    Stalled,
    StepItem,
    StepProgress,
    TextPiece,
)
from omni_rt.wire.tensors import Block, Inline, Local, nbytes_of
from omni_rt_workers.engine import Task
from omni_rt_workers.memory import Memory

if TYPE_CHECKING:
    import torch

    from omni_rt.wire.arena import Reservation

_TRACEBACK_CHARS = 8000


@dataclass(slots=True)
class _Waiting:
    """One chunk that has not found room yet, its bytes in ordinary memory."""

    port: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    last: bool
    meta: dict[str, Any] | None


@dataclass(slots=True)
class _Reserved:
    """The tensor handed out by `reserve` until it is published."""

    dtype: str
    shape: tuple[int, ...]
    place: Reservation | None  # None: in ordinary memory
    tensor: Any


@dataclass(slots=True)
class _Ledger:
    """What a task has sent so far and what waits."""

    seq: dict[str, int] = field(default_factory=dict)
    waiting: deque[_Waiting | StepItem] = field(default_factory=deque)
    reserved: dict[str, _Reserved] = field(default_factory=dict)
    dead: bool = False  # failed by the outbox: the engine's further words about it are ignored


class StageOutbox:
    """`engine.Outbox` of one stage."""

    def __init__(
        self, stage: str, memory: Memory, credits: dict[str, int], inline_limit: int
    ) -> None:
        self._stage = stage
        self._memory = memory
        self._credits = credits
        self._inline_limit = inline_limit
        self._used: dict[str, int] = dict.fromkeys(credits, 0)  # bytes lent out, by port
        self._lent: dict[tuple[int, int], tuple[str, int]] = {}  # (offset, generation) -> port, n
        self._books: dict[Task, _Ledger] = {}
        self._items: list[StepItem] = []
        self._stalls: list[Stalled] = []
        self.ended: list[Task] = []  # finished or failed by the engine since the loop last looked
        self.overflowed: list[Task] = []  # failed here: the loop has yet to abort them

    # ---- what the engine calls

    def text(self, task: Task, text: str, tokens: tuple[int, ...] = ()) -> None:
        if "text" in task.emit:
            self._chunk_or_wait(task, "text", TextPiece(text, tokens))

    def put(self, task: Task, port: str, tensor: torch.Tensor, *, last: bool = False) -> None:
        from omni_rt_workers.tensors import dtype_name

        if port not in task.emit:
            return
        out = self.reserve(task, port, tuple(tensor.shape), dtype_name(tensor.dtype))
        out.copy_(tensor)
        self.publish(task, port, last=last)

    def reserve(self, task: Task, port: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        from omni_rt_workers.tensors import as_tensor, empty

        nbytes = nbytes_of(dtype, shape)
        book = self._book(task)
        place = None
        if task.emit[port].transport == "shm" and nbytes > self._inline_limit:
            place = None if book.waiting else self._room(task, port, nbytes)
        tensor = empty(dtype, shape) if place is None else as_tensor(place.view, dtype, shape)
        book.reserved[port] = _Reserved(dtype, shape, place, tensor)
        return tensor

    def publish(
        self, task: Task, port: str, *, last: bool = False, meta: dict[str, Any] | None = None
    ) -> None:
        from omni_rt_workers.tensors import to_bytes

        book = self._book(task)
        held = book.reserved.pop(port)
        if held.place is not None:
            ref = self._lend(port, held.place, held.dtype, held.shape)
            self._chunk_or_wait(task, port, ref, last, meta)
        elif task.emit[port].transport == "local" and nbytes_of(held.dtype, held.shape):
            key = self._memory.keep(held.tensor)
            local = Local(self._memory.arena_id, key, key, held.dtype, held.shape)
            self._chunk_or_wait(task, port, local, last, meta)
        else:
            data = to_bytes(held.tensor)
            self._send_bytes(task, port, held.dtype, held.shape, data, last, meta)

    def put_bytes(
        self,
        task: Task,
        port: str,
        data: bytes | bytearray | memoryview,
        *,
        last: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        if port in task.emit:
            shape = (len(data),)
            self._send_bytes(task, port, "uint8", shape, data, last, meta)

    def progress(self, task: Task, step: int, total: int) -> None:
        self._item_or_wait(task, StepProgress(task.request, task.attempt, step, total))

    def finish(
        self,
        task: Task,
        reason: str = "stop",
        usage: dict[str, int] | None = None,
        facts: tuple[str, ...] = (),
    ) -> None:
        self._end(task, Finished(task.request, task.attempt, reason, usage or {}, facts))

    def fail(self, task: Task, error: BaseException) -> None:
        self._end(task, failed(task, error))

    # ---- what the loop calls

    def take_items(self) -> list[StepItem]:
        items, self._items = self._items, []
        return items

    def take_stalls(self) -> list[Stalled]:
        stalls, self._stalls = self._stalls, []
        return stalls

    def forget(self, task: Task) -> None:
        """The task was aborted: nothing of it may be sent any more."""
        book = self._books.pop(task, None)
        for held in book.reserved.values() if book else ():
            if held.place is not None:
                self._memory.writer.free(held.place.offset, held.place.generation)

    def freed(self, offset: int, generation: int) -> bool:
        """Main gave a block back. True if it was one of this stage's."""
        lent = self._lent.pop((offset, generation), None)
        if lent is None:
            return False
        port, nbytes = lent
        self._used[port] -= nbytes
        self._memory.writer.free(offset, generation)
        return True

    def flush_waiting(self) -> None:
        """Send what waits, oldest task first, as far as there is room."""
        for task in [task for task, book in self._books.items() if book.waiting]:
            self._flush(task)

    @property
    def waiting(self) -> int:
        return sum(1 for book in self._books.values() if book.waiting)

    # ---- inside

    def _book(self, task: Task) -> _Ledger:
        book = self._books.get(task)
        if book is None:
            book = self._books[task] = _Ledger()
        return book

    def _room(self, task: Task, port: str, nbytes: int) -> Reservation | None:
        """A place for a payload, or None if its port's credit or the arena is used up."""
        writer = self._memory.writer
        if not writer.fits(nbytes):
            self._overflow(task, port, nbytes)
            return None
        used = self._used.get(port, 0)
        credit = self._credits.get(port, writer.capacity_bytes)
        if used and used + nbytes > credit:  # one payload may always be under way
            return None
        return writer.reserve(nbytes)

    def _overflow(self, task: Task, port: str, nbytes: int) -> None:
        error = StageFailed(
            f"output '{port}' of {nbytes} bytes does not fit the stage's arena of "
            f"{self._memory.writer.capacity_bytes} bytes",
            request=task.request,
            stage=self._stage,
            hint=f"raise stages.{self._stage}.arena",
        )
        book = self._book(task)
        if not book.dead:
            book.waiting.clear()
            self._items.append(failed(task, error))
            book.dead = True
            self.overflowed.append(task)

    def _lend(self, port: str, place: Reservation, dtype: str, shape: tuple[int, ...]) -> Block:
        self._used[port] = self._used.get(port, 0) + place.nbytes
        self._lent[place.offset, place.generation] = (port, place.nbytes)
        return Block(self._memory.arena_id, place.offset, place.generation, dtype, shape)

    def _send_bytes(
        self,
        task: Task,
        port: str,
        dtype: str,
        shape: tuple[int, ...],
        data: bytes | bytearray | memoryview,
        last: bool,
        meta: dict[str, Any] | None,
    ) -> None:
        payload = None
        if not self._book(task).waiting:
            payload = self._payload(task, port, dtype, shape, data)
        if payload is not None:
            self._chunk_or_wait(task, port, payload, last, meta)
        else:
            self._wait(task, _Waiting(port, dtype, shape, bytes(data), last, meta))

    def _payload(
        self,
        task: Task,
        port: str,
        dtype: str,
        shape: tuple[int, ...],
        data: bytes | bytearray | memoryview,
    ) -> Payload | None:
        if len(data) <= self._inline_limit:
            return Inline(dtype, shape, bytes(data))
        if task.emit[port].transport == "local":
            key = self._memory.keep(memoryview(bytes(data)))
            return Local(self._memory.arena_id, key, key, dtype, shape)
        place = self._room(task, port, len(data))
        if place is None:
            return None
        place.view[:] = data
        return self._lend(port, place, dtype, shape)

    def _chunk_or_wait(
        self,
        task: Task,
        port: str,
        data: Payload | TextPiece,
        last: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        seqs = self._book(task).seq
        seq = seqs.get(port, 0)
        seqs[port] = seq + 1
        self._item_or_wait(task, Chunk(task.request, task.attempt, port, seq, data, last, meta))

    def _item_or_wait(self, task: Task, item: StepItem) -> None:
        book = self._book(task)
        if book.dead:
            return
        if book.waiting:
            book.waiting.append(item)
        else:
            self._items.append(item)

    def _wait(self, task: Task, chunk: _Waiting) -> None:
        book = self._book(task)
        waiting = book.waiting
        if book.dead:
            return
        if not waiting:
            writer = self._memory.writer
            free = writer.capacity_bytes - writer.in_use_bytes
            size = len(chunk.data)
            self._stalls.append(Stalled(self._stage, task.request, chunk.port, size, free))
        waiting.append(chunk)
        task.held = True

    def _flush(self, task: Task) -> None:
        book = self._books[task]
        while book.waiting and not book.dead:
            item = book.waiting[0]
            if isinstance(item, _Waiting):
                payload = self._payload(task, item.port, item.dtype, item.shape, item.data)
                if payload is None:
                    return
                seq = book.seq.get(item.port, 0)
                book.seq[item.port] = seq + 1
                item = Chunk(
                    task.request, task.attempt, item.port, seq, payload, item.last, item.meta
                )
            book.waiting.popleft()
            self._items.append(item)
            if isinstance(item, Finished | Failed):
                self._books.pop(task, None)
        task.held = False

    def _end(self, task: Task, item: Finished | Failed) -> None:
        if self._book(task).dead:
            return
        self._item_or_wait(task, item)
        self.ended.append(task)
        if not self._book(task).waiting:
            self.forget(task)


def failed(task: Task, error: BaseException) -> Failed:
    """The message for an error that ended a task. What is no `OmniError` is the stage's fault."""
    kind = error.kind if isinstance(error, OmniError) else StageFailed.kind
    message = str(error) if isinstance(error, OmniError) else f"{type(error).__name__}: {error}"
    detail = None
    if not isinstance(error, BadRequest):
        detail = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
    param = error.param if isinstance(error, BadRequest) else None
    return Failed(task.request, task.attempt, kind, message, param, detail)


def emits(wanted: tuple[Emit, ...]) -> dict[str, Emit]:
    return {emit.port: emit for emit in wanted}
