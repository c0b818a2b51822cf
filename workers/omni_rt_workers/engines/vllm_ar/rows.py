"""Rows of hidden states: what is kept of them, and how they come from rank 0 to the worker.

Where rank 0 has a process of its own, they come by reference. The worker makes an arena, and rank 0
is its writer: a row is copied into it out of the model's buffer, where a rank in the worker's
process would keep a copy in its own memory. What `collective_rpc` carries are descriptors. The
worker copies the rows to where the outbox wants them, as it would anyway, and tells rank 0 with its
next call which blocks it is through with.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from omni_rt.wire.arena import Arena, BlockReader, BlockWriter
from omni_rt.wire.tensors import nbytes_of
from omni_rt_workers.tensors import as_tensor, dtype_name

if TYPE_CHECKING:
    from omni_rt.wire.arena import Reservation

_SHARED_BYTES = 64 << 20
Block = tuple[int, int]  # offset, generation


class Part(NamedTuple):
    """Rows of consecutive positions, [tokens, hidden size]."""

    rows: torch.Tensor
    block: Block | None = None  # where they are shared


class Ref(NamedTuple):
    """A `Part` on its way between two processes."""

    block: Block
    dtype: str
    shape: tuple[int, ...]


class Keeper:
    """The side of the rank: copies rows out of a buffer that the next step writes into."""

    def __init__(self) -> None:
        self._writer: BlockWriter | None = None

    def share(self, process: int, fd: int, size_bytes: int) -> None:
        """From now on into the arena that `process`, the worker, has under `fd`.

        Its descriptor is opened through /proc. Raises `OSError` if that is not allowed.
        """
        own = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._writer = BlockWriter(Arena.attach(0, own, size_bytes, writable=True), epoch=0)

    def copy(self, rows: torch.Tensor) -> Part:
        """Where there is no room, as where nothing is shared, in memory of its own."""
        place = self._reserve(rows.nbytes)
        if place is None:
            return Part(rows.to("cpu", copy=True) if self._writer else rows.clone())
        shared = as_tensor(place.view, dtype_name(rows.dtype), tuple(rows.shape))
        shared.copy_(rows)
        return Part(shared, (place.offset, place.generation))

    def give(self, part: Part) -> torch.Tensor | Ref:
        """For `collective_rpc`: the rows themselves only where they are not shared."""
        if part.block is None:
            return part.rows
        return Ref(part.block, dtype_name(part.rows.dtype), tuple(part.rows.shape))

    def free(self, blocks: Collection[Block]) -> None:
        if self._writer is not None:
            for block in blocks:
                self._writer.free(*block)

    @property
    def blocks(self) -> int:
        """Shared blocks that are in use."""
        return len(self._writer) if self._writer is not None else 0

    def _reserve(self, nbytes: int) -> Reservation | None:
        return self._writer.reserve(nbytes) if self._writer is not None and nbytes else None


@dataclass(slots=True)
class Watched:
    """Rows of one request by absolute position: `next` is the first still wanted, `end` is past
    the last. A preempted request is computed again from position 0; what was seen is not kept
    twice, because it lies below `next`."""

    next: int
    end: int
    parts: list[Part] = field(default_factory=list)

    def keep(self, start: int, rows: torch.Tensor, keeper: Keeper) -> None:
        """Keep what is wanted of `rows`, which begin at position `start`."""
        if self.next < min(start, self.end):
            raise RuntimeError(f"hidden states of positions {self.next} to {start - 1} are missing")
        end = min(start + len(rows), self.end)
        if self.next < end:
            self.parts.append(keeper.copy(rows[self.next - start : end - start]))
            self.next = end

    def cut(self, end: int, keeper: Keeper) -> None:
        """Drop the rows of positions from `end` on: their tokens turned out not to be."""
        while self.parts and self.next > end:
            rows, block = self.parts.pop()
            first = self.next - len(rows)
            if first < end:
                self.parts.append(Part(rows[: end - first], block))
            elif block is not None:
                keeper.free([block])
            self.next = max(first, end)


class SharedRows:
    """The side of the worker."""

    def __init__(self, wanted_bytes: int) -> None:
        self.arena = Arena.create(0, min(wanted_bytes, _SHARED_BYTES))
        self._reader = BlockReader(self.arena)
        self._through: list[Block] = []

    def open(self, given: Any) -> torch.Tensor:
        """What `Keeper.give` gave. The block stays as long as any tensor over it does."""
        if isinstance(given, torch.Tensor):
            return given
        (offset, generation), dtype, shape = given
        view = self._reader.open(offset, generation, nbytes_of(dtype, shape))
        # torch's storage holds the view until the last tensor over it is gone.
        weakref.finalize(view, self._through.append, (offset, generation)).atexit = False
        return as_tensor(view, dtype, shape)

    def through(self) -> list[Block]:
        """Blocks that nobody looks at any more since this was asked last."""
        through = self._through.copy()
        del self._through[: len(through)]
        return through

    def close(self) -> None:
        self.arena.close()
