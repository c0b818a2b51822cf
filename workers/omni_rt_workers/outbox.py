"""Where engines put what they produced: written once, described in one `Step`.

Into the arena, or into the device pool. A task whose output finds no room is held: what it produced
waits here in order, in memory of the worker's own, and is sent when main frees blocks. See
`engine.Outbox` for the contract.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
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
    Transport,
)
from omni_rt.wire.tensors import Block, DeviceBlock, Inline, Local, nbytes_of
from omni_rt_workers.cuda.pool import DevicePool
from omni_rt_workers.engine import Task
from omni_rt_workers.memory import Home, Memory, Room, torch_side

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_TRACEBACK_CHARS = 8000
Bytes = bytes | memoryview


@dataclass(slots=True)
class _Waiting:
    """One chunk that has not found room yet."""

    port: str
    seq: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes | torch.Tensor  # a tensor waits on its device
    last: bool
    meta: dict[str, Any] | None


@dataclass(slots=True)
class _Reserved:
    """The tensor handed out by `reserve` until it is published."""

    dtype: str
    shape: tuple[int, ...]
    room: Room | None  # None: in memory of the worker's own
    tensor: torch.Tensor
    on_device: bool


@dataclass(slots=True)
class _Ledger:
    """What a task has sent so far and what waits."""

    seq: dict[str, int] = field(default_factory=dict)
    waiting: deque[_Waiting | StepItem] = field(default_factory=deque)
    reserved: dict[str, _Reserved] = field(default_factory=dict)
    dead: bool = False  # failed by the outbox: the engine's further words about it are ignored


BlockKey = tuple[int, int, int]
"""(arena or pool id, offset, generation)"""


class StageOutbox:
    """`engine.Outbox` of one stage."""

    def __init__(
        self, stage: str, memory: Memory, credits: dict[str, int], inline_limit: int
    ) -> None:
        self._stage = stage
        self._memory = memory
        self._credits = credits
        self._inline_limit = inline_limit
        self._used: Counter[tuple[int, str]] = Counter()  # bytes lent out, by memory and port
        self._lent: dict[BlockKey, tuple[str, Room]] = {}  # with the port
        self._books: dict[Task, _Ledger] = {}
        self._items: list[StepItem] = []
        self._stalls: list[Stalled] = []
        self.ended: list[Task] = []  # finished or failed by the engine since the loop last looked
        self.overflowed: list[Task] = []  # failed here: the loop has yet to abort them

    # ---- what the engine calls

    def text(self, task: Task, text: str, tokens: tuple[int, ...] = ()) -> None:
        self.piece(task, TextPiece(text, tokens))

    def piece(self, task: Task, piece: TextPiece) -> None:
        if "text" in task.emit:
            self._chunk_or_wait(task, "text", piece)

    def put(self, task: Task, port: str, tensor: torch.Tensor, *, last: bool = False) -> None:
        if port not in task.emit:
            return
        dtype, shape = torch_side().dtype_name(tensor.dtype), tuple(tensor.shape)
        if task.emit[port].transport == "local" and tensor.numel():
            # On its device; a copy, for the engine may write into its own one at the next step.
            self._keep(task, port, dtype, shape, tensor.detach().clone(), last)
            return
        if tensor.nbytes <= self._inline_limit:
            self._send(task, port, dtype, shape, torch_side().to_bytes(tensor), last, None)
            return
        self.reserve(task, port, shape, dtype).copy_(tensor.detach())
        self.publish(task, port, last=last)

    def reserve(self, task: Task, port: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        nbytes, transport = nbytes_of(dtype, shape), task.emit[port].transport
        book = self._book(task)
        self._take_back(book, port)
        room, pool = None, None
        if transport != "local" and nbytes > self._inline_limit:
            homes = self._memory.homes(transport, nbytes)
            pool = next((home for home in homes if isinstance(home, DevicePool)), None)
            room = None if book.waiting or book.dead else self._room(port, homes, nbytes)
        if room is not None:
            tensor = room.tensor(dtype, shape)
        else:
            tensor = torch_side().empty(dtype, shape, pool.memory.device if pool else "cpu")
        book.reserved[port] = _Reserved(dtype, shape, room, tensor, pool is not None)
        return tensor

    def publish(
        self, task: Task, port: str, *, last: bool = False, meta: dict[str, Any] | None = None
    ) -> None:
        book = self._book(task)
        if book.dead:  # what is reserved goes back when the loop has aborted the task
            return
        held = book.reserved.pop(port)
        if held.room is not None:
            ref = self._lend(port, held.room, held.dtype, held.shape)
            self._chunk_or_wait(task, port, ref, last, meta)
        elif task.emit[port].transport == "local" and nbytes_of(held.dtype, held.shape):
            self._keep(task, port, held.dtype, held.shape, held.tensor, last, meta)
        else:
            data = held.tensor if held.on_device else torch_side().to_bytes(held.tensor)
            self._send(task, port, held.dtype, held.shape, data, last, meta)

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
            self._send(task, port, "uint8", (len(data),), data, last, meta)

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

    def forget_ended(self, request: str, attempt: int) -> None:
        """The same, for a task that the engine has finished and whose output still waits here."""
        for task in list(self._books):
            if (task.request, task.attempt) == (request, attempt):
                self.forget(task)

    def freed(self, key: BlockKey) -> bool:
        """Main gave a block back. True if it was one of this stage's."""
        lent = self._lent.pop(key, None)
        if lent is None:
            return False
        port, room = lent
        self._give(port, room)
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

    def _room(self, port: str, homes: Sequence[Home], nbytes: int) -> Room | None:
        """Room for a payload, or None if its port's credit or the memory is used up everywhere."""
        arena = self._memory.writer.capacity_bytes
        for home in homes:
            used = self._used[self._id(home), port]
            credit = self._credits.get(port, arena) * home.capacity_bytes // arena  # same share
            if used and used + self._memory.cost(home, nbytes) > credit:
                continue  # one payload may always be under way
            if room := self._memory.reserve(home, nbytes):
                self._used[room.key[0], port] += room.cost_bytes
                return room
        return None

    def _id(self, home: Home) -> int:
        return home.id if isinstance(home, DevicePool) else self._memory.arena_id

    def _give(self, port: str, room: Room) -> None:
        self._used[room.key[0], port] -= room.cost_bytes
        room.free()

    def _take_back(self, book: _Ledger, port: str | None = None) -> None:
        """What was reserved and never published, on one port or on all."""
        for name in [port] if port is not None else list(book.reserved):
            held = book.reserved.pop(name, None)
            if held is not None and held.room is not None:
                self._give(name, held.room)

    def _drop_waiting(self, book: _Ledger) -> None:
        for item in book.waiting:
            ref = item.data if isinstance(item, Chunk) else None
            if isinstance(ref, Block):  # lent already, but main has never heard of it
                self.freed((ref.arena, ref.offset, ref.generation))
            elif isinstance(ref, DeviceBlock):
                self.freed((ref.pool, ref.offset, ref.generation))
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

    def _lend(
        self, port: str, room: Room, dtype: str, shape: tuple[int, ...]
    ) -> Block | DeviceBlock:
        self._lent[room.key] = (port, room)
        return room.publish(dtype, shape)

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

    def _send(
        self,
        task: Task,
        port: str,
        dtype: str,
        shape: tuple[int, ...],
        data: Bytes | torch.Tensor,
        last: bool,
        meta: dict[str, Any] | None,
    ) -> None:
        book = self._book(task)
        if book.dead:
            return
        nbytes, transport = nbytes_of(dtype, shape), task.emit[port].transport
        if transport == "local" and nbytes > self._inline_limit and isinstance(data, Bytes):
            # Writable, so that each reader's tensor is a view of it.
            self._keep(task, port, dtype, shape, memoryview(bytearray(data)), last, meta)
            return
        if nbytes > self._inline_limit and not self._homes(transport, data, nbytes):
            self._overflow(task, port, nbytes)
            return
        payload = None
        if not book.waiting:
            payload = self._payload(port, transport, dtype, shape, data)
        if payload is not None:
            self._chunk_or_wait(task, port, payload, last, meta)
        else:
            waits = bytes(data) if isinstance(data, memoryview) else data
            seq = self._next_seq(task, port)
            self._wait(task, _Waiting(port, seq, dtype, shape, waits, last, meta))

    def _payload(
        self,
        port: str,
        transport: Transport,
        dtype: str,
        shape: tuple[int, ...],
        data: Bytes | torch.Tensor,
    ) -> Payload | None:
        nbytes = nbytes_of(dtype, shape)
        if nbytes <= self._inline_limit:
            assert isinstance(data, Bytes)
            return Inline(dtype, shape, bytes(data))
        room = self._room(port, self._homes(transport, data, nbytes), nbytes)
        if room is None:
            return None
        room.write(data, dtype, shape)
        return self._lend(port, room, dtype, shape)

    def _homes(
        self, transport: Transport, data: Bytes | torch.Tensor, nbytes: int
    ) -> Sequence[Home]:
        """Bytes are in ordinary memory and stay there, whatever the edge."""
        return self._memory.homes("shm" if isinstance(data, Bytes) else transport, nbytes)

    def _chunk_or_wait(
        self,
        task: Task,
        port: str,
        data: Payload | TextPiece,
        last: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        book = self._book(task)
        if book.dead:
            return
        seq = book.seq.get(port, 0)
        book.seq[port] = seq + 1
        chunk = Chunk(task.request, task.attempt, port, seq, data, last, meta)
        (book.waiting if book.waiting else self._items).append(chunk)

    def _next_seq(self, task: Task, port: str) -> int:
        seqs = self._book(task).seq
        seq = seqs.get(port, 0)
        seqs[port] = seq + 1
        return seq

    def _item_or_wait(self, task: Task, item: StepItem) -> None:
        book = self._book(task)
        if not book.dead:
            (book.waiting if book.waiting else self._items).append(item)

    def _wait(self, task: Task, chunk: _Waiting) -> None:
        waiting = self._book(task).waiting
        if not waiting:
            size = nbytes_of(chunk.dtype, chunk.shape)
            home = self._homes(task.emit[chunk.port].transport, chunk.data, size)[-1]
            free = home.capacity_bytes - home.in_use_bytes
            where = self._id(home)
            self._stalls.append(Stalled(self._stage, task.request, chunk.port, size, free, where))
        waiting.append(chunk)
        task.held = True

    def _flush(self, task: Task) -> None:
        book = self._books[task]
        while book.waiting:
            item = book.waiting[0]
            if isinstance(item, _Waiting):
                transport = task.emit[item.port].transport
                payload = self._payload(item.port, transport, item.dtype, item.shape, item.data)
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
