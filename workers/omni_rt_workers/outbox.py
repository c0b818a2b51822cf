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
    seq: int
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
        from omni_rt_workers.tensors import dtype_name, to_bytes

        if port not in task.emit:
            return
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        if task.emit[port].transport == "local" and tensor.numel():
            # On its device; a copy, for the engine may write into its own one at the next step.
            self._keep(task, port, dtype, shape, tensor.detach().clone(), last)
            return
        if tensor.nbytes <= self._inline_limit:
            self._send_bytes(task, port, dtype, shape, to_bytes(tensor), last, None)
            return
        self.reserve(task, port, shape, dtype).copy_(tensor.detach())
        self.publish(task, port, last=last)

    def reserve(self, task: Task, port: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        from omni_rt_workers.tensors import as_tensor, empty

        nbytes = nbytes_of(dtype, shape)
        book = self._book(task)
        self._take_back(book, port)
        place = None
        if task.emit[port].transport == "shm" and nbytes > self._inline_limit:
            place = None if book.waiting or book.dead else self._room(port, nbytes)
        tensor = empty(dtype, shape) if place is None else as_tensor(place.view, dtype, shape)
        book.reserved[port] = _Reserved(dtype, shape, place, tensor)
        return tensor

    def publish(
        self, task: Task, port: str, *, last: bool = False, meta: dict[str, Any] | None = None
    ) -> None:
        from omni_rt_workers.tensors import to_bytes

        book = self._book(task)
        if book.dead:  # what is reserved goes back when the loop has aborted the task
            return
        held = book.reserved.pop(port)
        if held.place is not None:
            ref = self._lend(port, held.place, held.dtype, held.shape)
            self._chunk_or_wait(task, port, ref, last, meta)
        elif task.emit[port].transport == "local" and nbytes_of(held.dtype, held.shape):
            self._keep(task, port, held.dtype, held.shape, held.tensor, last, meta)
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
            data = memoryview(data).cast("B")
            self._send_bytes(task, port, "uint8", (len(data),), data, last, meta)

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
        if book is not None:
            self._take_back(book)
            self._drop_waiting(book)

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

    def _room(self, port: str, nbytes: int) -> Reservation | None:
        """A place for a payload, or None if its port's credit or the arena is used up."""
        writer = self._memory.writer
        used = self._used.get(port, 0)
        credit = self._credits.get(port, writer.capacity_bytes)
        if used and used + nbytes > credit:  # one payload may always be under way
            return None
        place = writer.reserve(nbytes)
        if place is not None:
            self._used[port] = used + nbytes
        return place

    def _take_back(self, book: _Ledger, port: str | None = None) -> None:
        """What was reserved and never published, on one port or on all."""
        for name in [port] if port is not None else list(book.reserved):
            held = book.reserved.pop(name, None)
            if held is not None and held.place is not None:
                self._used[name] -= held.place.nbytes
                self._memory.writer.free(held.place.offset, held.place.generation)

    def _drop_waiting(self, book: _Ledger) -> None:
        for item in book.waiting:
            ref = item.data if isinstance(item, Chunk) else None
            if isinstance(ref, Block):  # lent already, but main has never heard of it
                self.freed(ref.offset, ref.generation)
            elif isinstance(ref, Local):
                self._memory.drop(ref.offset)
        book.waiting.clear()

    def _overflow(self, task: Task, port: str, nbytes: int) -> None:
        error = StageFailed(
            f"output '{port}' of {nbytes} bytes does not fit the stage's arena of "
            f"{self._memory.writer.capacity_bytes} bytes",
            request=task.request,
            stage=self._stage,
            hint=f"raise stages.{self._stage}.arena",
        )
        book = self._book(task)
        self._drop_waiting(book)
        self._items.append(failed(task, error))
        book.dead = True
        self.overflowed.append(task)

    def _lend(self, port: str, place: Reservation, dtype: str, shape: tuple[int, ...]) -> Block:
        self._lent[place.offset, place.generation] = (port, place.nbytes)
        return Block(self._memory.arena_id, place.offset, place.generation, dtype, shape)

    def _keep(
        self,
        task: Task,
        port: str,
        dtype: str,
        shape: tuple[int, ...],
        thing: torch.Tensor | memoryview,
        last: bool,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Hand the object itself on: both ends of the edge are in this worker."""
        if self._book(task).dead:
            return
        key = self._memory.keep(thing)
        local = Local(self._memory.arena_id, key, key, dtype, shape)
        self._chunk_or_wait(task, port, local, last, meta)

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
        book = self._book(task)
        if book.dead:
            return
        inline = len(data) <= self._inline_limit
        if task.emit[port].transport == "local" and not inline:
            # Writable, so that each reader's tensor is a view of it.
            self._keep(task, port, dtype, shape, memoryview(bytearray(data)), last, meta)
            return
        if not inline and not self._memory.writer.fits(len(data)):
            self._overflow(task, port, len(data))
            return
        payload = None if book.waiting else self._payload(port, dtype, shape, data)
        if payload is not None:
            self._chunk_or_wait(task, port, payload, last, meta)
        else:
            seq = self._next_seq(task, port)
            self._wait(task, _Waiting(port, seq, dtype, shape, bytes(data), last, meta))

    def _payload(
        self,
        port: str,
        dtype: str,
        shape: tuple[int, ...],
        data: bytes | bytearray | memoryview,
    ) -> Payload | None:
        if len(data) <= self._inline_limit:
            return Inline(dtype, shape, bytes(data))
        place = self._room(port, len(data))
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
        seq = self._next_seq(task, port)
        self._item_or_wait(task, Chunk(task.request, task.attempt, port, seq, data, last, meta))

    def _next_seq(self, task: Task, port: str) -> int:
        seqs = self._book(task).seq
        seq = seqs.get(port, 0)
        seqs[port] = seq + 1
        return seq

    def _item_or_wait(self, task: Task, item: StepItem) -> None:
        book = self._book(task)
        if book.dead:
            return
        if book.waiting:
            book.waiting.append(item)
        else:
            self._items.append(item)

    def _wait(self, task: Task, chunk: _Waiting) -> None:
        waiting = self._book(task).waiting
        if not waiting:
            writer = self._memory.writer
            free = writer.capacity_bytes - writer.in_use_bytes
            size = len(chunk.data)
            self._stalls.append(Stalled(self._stage, task.request, chunk.port, size, free))
        waiting.append(chunk)
        task.held = True

    def _flush(self, task: Task) -> None:
        book = self._books[task]
        while book.waiting:
            item = book.waiting[0]
            if isinstance(item, _Waiting):
                payload = self._payload(item.port, item.dtype, item.shape, item.data)
                if payload is None:
                    return
                item = Chunk(
                    task.request, task.attempt, item.port, item.seq, payload, item.last, item.meta
                )
            book.waiting.popleft()
            self._items.append(item)
            if isinstance(item, Finished | Failed):
                self._books.pop(task, None)
        task.held = False

    def _end(self, task: Task, item: Finished | Failed) -> None:
        book = self._book(task)
        if book.dead:
            return
        self._take_back(book)
        self._item_or_wait(task, item)
        self.ended.append(task)
        if not book.waiting:
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
