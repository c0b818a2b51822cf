"""The memory a worker shares: what it writes, what it reads, the objects it keeps.

It writes one arena and, if it was given one, one device pool. No torch here: engines that need none
start at once. `tensors.py` makes tensors of the views.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from omni_rt.errors import OmniError, ProtocolError, StaleRef
from omni_rt.wire.arena import Arena, BlockReader, BlockWriter, Reservation
from omni_rt.wire.messages import AttachPool, Offered, Transport
from omni_rt.wire.tensors import Block, DeviceBlock, Inline, Local
from omni_rt_workers.cuda.driver import DeviceDriver, Stream
from omni_rt_workers.cuda.pool import DevicePool, Place
from omni_rt_workers.cuda.probe import Attempt, offer_device, take_device
from omni_rt_workers.cuda.reader import DevicePoolReader, OpenBlock

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Home = BlockWriter | DevicePool


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

    cost_bytes: int  # what it takes of its memory, against the port's credit

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
        self.cost_bytes = place.nbytes
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
        self.cost_bytes = pool.cost(place.nbytes)
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
    writes there; the pool's table is in the arena, at `table`.
    """

    def __init__(
        self,
        arena: Arena,
        epoch: int,
        driver: DeviceDriver | None = None,
        device: str = "",
        pool: DevicePool | None = None,
        *,
        table: int = 0,
    ) -> None:
        self.writer = BlockWriter(arena, epoch, size_bytes=table or None)
        self.pool = pool
        self.arena_id = arena.id
        self._driver = driver
        self._device = device
        self._table = table
        self._readers: dict[int, BlockReader] = {arena.id: BlockReader(arena)}
        self._arenas: dict[int, Arena] = {arena.id: arena}
        self._pools = {pool.id: pool.own_reader()} if pool is not None else {}
        self._probe = None
        if pool is not None and driver is not None:
            self._probe = offer_device(pool, driver, self._stream())
        self._objects: dict[int, Any] = {}
        self._next_key = 1

    # ---- writing

    def homes(self, transport: Transport, nbytes: int) -> list[Home]:
        """Where a payload of that size can go, best first: on the device if the edge goes there,
        and always in the arena, so that a full pool holds nobody who could go on without one."""
        homes: list[Home] = [self.writer]
        if transport == "cuda" and self.pool is not None:
            homes.insert(0, self.pool)
        return [home for home in homes if home.fits(nbytes)]

    def reserve(self, home: Home, nbytes: int) -> Room | None:
        """A block to write into, or None if there is no room for it now."""
        if isinstance(home, BlockWriter):
            reserved = home.reserve(nbytes)
            return ArenaRoom(self.arena_id, home, reserved) if reserved else None
        place = home.reserve(nbytes, self._stream())
        return PoolRoom(home, place) if place else None

    def offer(self, reader: int) -> Offered:
        """What another process needs to read the pool, with noise to try it on."""
        assert self.pool is not None, "there is no pool to offer"
        attach = self.pool.attachment(reader)
        where = replace(attach, arena=self.arena_id, table=self._table, probe=self._probe)
        return Offered(reader, where)

    def cost(self, home: Home, nbytes: int) -> int:
        """Bytes of a payload, as they count against its port's credit: whole slots in a pool."""
        return home.cost(nbytes) if isinstance(home, DevicePool) else nbytes

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
        arena = self._arenas.get(attach.arena)
        if arena is None:
            raise ProtocolError(f"pool {attach.pool} came without its writer's arena")
        table = arena.view(attach.table, arena.size_bytes - attach.table)
        self._pools[attach.pool] = DevicePoolReader.attach(
            self._driver, attach, self._device, table
        )

    def probe(self, attach: AttachPool) -> Attempt:
        """Read the noise that came with a pool."""
        if self._driver is None or attach.probe is None:
            return Attempt("there is nothing to try")
        return take_device(self._pools[attach.pool], self._driver, self._stream(), attach.probe)

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

    def check(self, ref: Block | DeviceBlock) -> None:
        """Raise `StaleRef` if the block was reused while it was lent: what was read is void."""
        if isinstance(ref, DeviceBlock):
            if (pool := self._pools.get(ref.pool)) is not None:
                pool.check(ref)
            return
        reader = self._readers.get(ref.arena)
        if reader is not None:
            reader.check(ref.offset, ref.generation)

    def close(self) -> None:
        self._objects.clear()
        for memory_id in [*self._pools, *self._arenas]:  # a pool's table is in an arena
            self.detach(memory_id)
        if self.pool is not None:
            self.pool.close()

    def _stream(self) -> Stream:
        assert self._driver is not None, "a pool comes with its driver"
        return self._driver.current_stream(self._device)
