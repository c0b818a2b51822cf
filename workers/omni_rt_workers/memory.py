"""The memory a worker shares: what it writes, what it reads, the objects it keeps.

It writes one arena and, if it was given one, one device pool. No torch here: engines that need none
start at once. `tensors.py` makes tensors of the views.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from omni_rt.errors import OmniError, StaleRef
from omni_rt.wire.arena import Arena, BlockReader, BlockWriter, Reservation
from omni_rt.wire.messages import AttachPool, Transport
from omni_rt.wire.tensors import Block, DeviceBlock, Inline, Local
from omni_rt_workers.cuda.driver import DeviceDriver, Stream
from omni_rt_workers.cuda.pool import DevicePool, Place
from omni_rt_workers.cuda.reader import DevicePoolReader, OpenBlock

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


class TorchSide(Protocol):
    """The module `tensors`."""

    def as_tensor(self, view: memoryview, dtype: str, shape: Shape) -> torch.Tensor: ...
    def typed(self, memory: torch.Tensor, dtype: str, shape: Shape) -> torch.Tensor: ...
    def empty(
        self, dtype: str, shape: Shape, device: torch.device | str = "cpu"
    ) -> torch.Tensor: ...
    def dtype_name(self, dtype: torch.dtype) -> str: ...
    def to_bytes(self, tensor: torch.Tensor) -> bytes: ...


@functools.cache
def torch_side() -> TorchSide:
    """`tensors`, imported when a tensor is asked for first; an import statement on the way of each
    would cost it 5 us and more every time."""
    from omni_rt_workers import tensors

    return tensors


class Room(Protocol):
    """A reserved block, in the arena or in the pool, until it is freed."""

    nbytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """(arena or pool id, offset, generation), as `Free` names it."""
        ...

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The block itself, to write into."""
        ...

    def write(self, data: bytes | memoryview | torch.Tensor, dtype: str, shape: Shape) -> None:
        """Copy all of it in. Bytes go into arenas only."""
        ...

    def publish(self, dtype: str, shape: tuple[int, ...]) -> Block | DeviceBlock:
        """All is written. On a device: all that will be, is in its stream."""
        ...

    def free(self) -> None: ...


class ArenaRoom:
    def __init__(self, arena_id: int, writer: BlockWriter, place: Reservation) -> None:
        self.nbytes = place.nbytes
        self.view = place.view
        self.key = (arena_id, place.offset, place.generation)
        self._writer = writer

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch_side().as_tensor(self.view, dtype, shape)

    def write(self, data: bytes | memoryview | torch.Tensor, dtype: str, shape: Shape) -> None:
        if isinstance(data, bytes | memoryview):
            self.view[:] = data
        else:
            self.tensor(dtype, shape).copy_(data)

    def publish(self, dtype: str, shape: tuple[int, ...]) -> Block:
        return Block(*self.key, dtype, shape)

    def free(self) -> None:
        _, offset, generation = self.key
        self._writer.free(offset, generation)


class PoolRoom:
    def __init__(self, pool: DevicePool, place: Place) -> None:
        self.nbytes = place.nbytes
        self.key = (pool.id, place.offset, place.generation)
        self._pool = pool
        self._place = place

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch_side().typed(self._pool.tensor(self._place), dtype, shape)

    def write(self, data: bytes | memoryview | torch.Tensor, dtype: str, shape: Shape) -> None:
        assert not isinstance(data, bytes | memoryview)
        self.tensor(dtype, shape).copy_(data)

    def publish(self, dtype: str, shape: tuple[int, ...]) -> DeviceBlock:
        self._pool.publish(self._place)
        return DeviceBlock(*self.key, self._place.slot, dtype, shape)

    def free(self) -> None:
        self._pool.free(self._place.offset, self._place.generation)


class Memory:
    """What this worker can write to and read from. Used by its one thread only.

    `driver` and `device` (its UUID) are those of a worker on a device, and `pool` is what it
    writes there.
    """

    def __init__(
        self,
        arena: Arena,
        epoch: int,
        driver: DeviceDriver | None = None,
        device: str = "",
        pool: DevicePool | None = None,
    ) -> None:
        self.writer = BlockWriter(arena, epoch)
        self.pool = pool
        self.arena_id = arena.id
        self._driver = driver
        self._device = device
        self._readers: dict[int, BlockReader] = {arena.id: BlockReader(arena)}
        self._arenas: dict[int, Arena] = {arena.id: arena}
        self._pools = {pool.id: pool.own_reader()} if pool is not None else {}
        self._objects: dict[int, Any] = {}
        self._next_key = 1

    # ---- writing

    def home(self, transport: Transport, nbytes: int) -> BlockWriter | DevicePool:
        """Where a payload goes: on the device if the edge goes there and it fits the pool."""
        if transport == "cuda" and self.pool is not None and self.pool.fits(nbytes):
            return self.pool
        return self.writer

    def reserve(self, home: BlockWriter | DevicePool, nbytes: int) -> Room | None:
        """A block to write into, or None if there is no room for it now."""
        if isinstance(home, BlockWriter):
            reserved = home.reserve(nbytes)
            return ArenaRoom(self.arena_id, home, reserved) if reserved else None
        place = home.reserve(nbytes, self._stream())
        return PoolRoom(home, place) if place else None

    def keep(self, thing: Any) -> int:
        """Put an object into the table of `local` refs; the key is never reused."""
        key = self._next_key
        self._next_key += 1
        self._objects[key] = thing
        return key

    def drop(self, key: int) -> None:
        self._objects.pop(key, None)

    # ---- reading

    def attach(self, arena: Arena) -> None:
        self._arenas[arena.id] = arena
        self._readers[arena.id] = BlockReader(arena)

    def attach_pool(self, attach: AttachPool) -> None:
        if self._driver is None:
            raise OmniError(f"pool {attach.pool} cannot be read here: this worker has no device")
        self._pools[attach.pool] = DevicePoolReader.attach(self._driver, attach, self._device)

    def detach(self, memory_id: int) -> None:
        """Of an arena or a pool: no ref into it will come any more."""
        self._readers.pop(memory_id, None)
        if (arena := self._arenas.pop(memory_id, None)) is not None:
            arena.close()
        if (pool := self._pools.pop(memory_id, None)) is not None:
            pool.close()

    def kept(self, ref: Local) -> Any:
        try:
            return self._objects[ref.offset]
        except KeyError:
            raise StaleRef(f"local object {ref.offset} is gone") from None

    def view(self, ref: Inline | Block) -> memoryview:
        """The ref's bytes, in place. Raises `StaleRef`."""
        if isinstance(ref, Inline):
            return memoryview(ref.data)
        reader = self._readers.get(ref.arena)
        if reader is None:
            raise StaleRef(f"arena {ref.arena} is not attached to this worker")
        return reader.open(ref.offset, ref.generation, ref.nbytes)

    def open(self, ref: DeviceBlock) -> OpenBlock:
        """The block on the device, for one lease on it. Raises `StaleRef`."""
        pool = self._pools.get(ref.pool)
        if pool is None:
            raise StaleRef(f"pool {ref.pool} is not attached to this worker")
        return pool.open(ref, self._stream())

    def tensor(self, block: OpenBlock) -> torch.Tensor:
        """What is in the block, for the stream that is current now."""
        block.use_on(self._stream())
        return torch_side().typed(block.tensor(), block.ref.dtype, block.ref.shape)

    def check(self, ref: Block) -> None:
        """Raise `StaleRef` if the block was reused while it was lent: what was read is void."""
        reader = self._readers.get(ref.arena)
        if reader is not None:
            reader.check(ref.offset, ref.generation)

    def close(self) -> None:
        self._objects.clear()
        for memory_id in [*self._arenas, *self._pools]:
            self.detach(memory_id)
        if self.pool is not None:
            self.pool.close()

    def _stream(self) -> Stream:
        assert self._driver is not None, "a pool comes with its driver"
        return self._driver.current_stream(self._device)
