"""The writer's side of a device pool: one allocation, cut into slots, that others read by IPC.

A block takes one or more neighbouring slots and goes by its first one. Each slot has one event
`written` and, for each reader, one event `read`. They are made once, with the pool: a hand-off
makes nothing, exports nothing, and no one waits on the host.

A reader need not finish reading before it gives its lease back: it records `read` behind what it
has given its stream. A freed block's slots are used again once these events are done, which
`reserve` asks; until then they are draining. They are never waited for in the writer's stream: a
wait that is queued there cannot be taken back, and the reader may die before it gets to its event.
Of the writer's own events that cannot be, so its streams do wait for `written`.

The `table` has the generation that lies in each slot, 0 for none. It is in shared memory that the
readers see too: a ref to a block that is gone is found out when it is opened, and when it is given
back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_rt.errors import ProtocolError, StaleRef
from omni_rt.wire.arena import TABLE_BYTES
from omni_rt.wire.messages import AttachPool
from omni_rt.wire.spans import FreeSpans
from omni_rt_workers.cuda.driver import Address, DeviceDriver, Event, Stream
from omni_rt_workers.cuda.reader import DevicePoolReader

if TYPE_CHECKING:
    import torch

# Smaller allocations share their page with others, and a handle exposes the whole page.
GRANULE_BYTES = 2 << 20
# The driver has some 20,000 interprocess events, and a pool needs two or more for each slot. A slot
# is also the least that a block takes.
MAX_SLOTS = TABLE_BYTES // 8
_LEAST_SLOT_BYTES = 64 << 10
_COUNTER_BITS = 40


@dataclass(frozen=True, slots=True)
class Place:
    """A block that was reserved and not freed yet."""

    offset: int  # bytes from the pool's start
    nbytes: int
    generation: int
    slot: int
    address: Address
    stream: Stream  # the block is written in this stream's order


@dataclass(slots=True)
class _Block:
    place: Place
    slots: int
    published: bool = False


class DevicePool:
    """One thread of one process. `readers` is how many processes may ever read from it at once."""

    def __init__(
        self,
        driver: DeviceDriver,
        pool_id: int,
        device: str,
        size_bytes: int,
        *,
        readers: int,
        epoch: int,
        slot_bytes: int | None = None,
        table: memoryview | None = None,
        granule_bytes: int | None = None,
    ) -> None:
        granule = granule_bytes or GRANULE_BYTES
        self.id = pool_id
        self.device = device
        self.capacity_bytes = -(-size_bytes // granule) * granule  # what is kept does not count
        self._size_bytes = self.capacity_bytes
        self._driver = driver
        self._slot_bytes = slot_bytes or _slot_bytes(self.capacity_bytes)
        count = self.capacity_bytes // self._slot_bytes
        self.table = (table or memoryview(bytearray(8 * count)))[: 8 * count].cast("Q")
        self._lent_slots = 0
        self._draining: list[tuple[int, int]] = []  # (first slot, slots) of freed blocks
        self._free = FreeSpans(count)
        self._generation = epoch << _COUNTER_BITS
        self._blocks: dict[int, _Block] = {}  # by offset
        self._last: list[int | None] = [None] * count  # of each slot: the last block's first slot
        self._base = driver.allocate(device, self.capacity_bytes)
        self._written = [driver.create_event(device) for _ in range(count)]
        self._read = [self._events(count) for _ in range(readers)]
        self._memory: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"<DevicePool {self.id} {self.in_use_bytes} of {self.capacity_bytes} bytes in use>"

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def in_use_bytes(self) -> int:
        """Whole slots, of blocks that are not freed or that somebody still reads."""
        self._settle()
        return (self._lent_slots + sum(slots for _, slots in self._draining)) * self._slot_bytes

    @property
    def draining(self) -> bool:
        """Whether there will be more room when the device has done what it was given."""
        return bool(self._draining)

    def cost(self, nbytes: int) -> int:
        """Bytes of the pool that a payload takes."""
        return self._span(nbytes) * self._slot_bytes

    def attachment(self, reader: int) -> AttachPool:
        """What the process that reads as number `reader` needs to open the pool."""
        driver, device = self._driver, self.device
        events = [*self._written, *self._read[reader]]
        return AttachPool(
            pool=self.id,
            size_bytes=self._size_bytes,
            device=device,
            handle=driver.export(device, self._base),
            events=[driver.export_event(device, event) for event in events],
        )

    def own_reader(self) -> DevicePoolReader:
        """For stages of this very process, which cannot open what it exports."""
        read = self._events(len(self._written))
        self._read.append(read)  # behind those of other processes: their numbers stay
        return DevicePoolReader(
            self._driver,
            self.id,
            self.device,
            self._base,
            self._size_bytes,
            self._written,
            read,
            self.table,
        )

    def fits(self, nbytes: int) -> bool:
        """Whether a payload of that size fits the empty pool."""
        return self.cost(nbytes) <= self.capacity_bytes

    def reserve(self, nbytes: int, stream: Stream) -> Place | None:
        """A block to write into on `stream`, or None if there is no room for it now."""
        span = self._span(nbytes)
        self._settle()
        slot = self._free.take(span)
        if slot is None:
            return None
        for last in {last for last in self._last[slot : slot + span] if last is not None}:
            self._driver.wait(self._written[last], stream)
        self._generation += 1
        self._lent_slots += span
        self._mark(slot, span, self._generation)
        offset = slot * self._slot_bytes
        place = Place(offset, nbytes, self._generation, slot, self._base + offset, stream)
        self._blocks[offset] = _Block(place, span)
        return place

    @property
    def memory(self) -> torch.Tensor:
        """All of the pool, as uint8."""
        if self._memory is None:
            self._memory = self._driver.tensor(self.device, self._base, self._size_bytes)
        return self._memory

    def tensor(self, place: Place) -> torch.Tensor:
        """The block as a uint8 tensor, to be written on the place's stream."""
        return self.memory[place.offset : place.offset + place.nbytes]

    def publish(self, place: Place) -> None:
        """All has been written, or will have been in the stream's order: readers may come."""
        block = self._find(place.offset, place.generation)
        if block.published:
            raise ProtocolError(f"block {place.generation} of pool {self.id} is published already")
        self._driver.record(self._written[place.slot], place.stream)
        block.published = True

    def free(self, offset: int, generation: int) -> None:
        """Give a block back: all readers have released it, or it was never published.

        Raises `StaleRef` if it is not that block any more.
        """
        block = self._find(offset, generation)
        place = block.place
        if not block.published:  # what has been written of it comes before the next use too
            self._driver.record(self._written[place.slot], place.stream)
        del self._blocks[offset]
        self._lent_slots -= block.slots
        self._mark(place.slot, block.slots, 0)
        self._last[place.slot : place.slot + block.slots] = [place.slot] * block.slots
        self._draining.append((place.slot, block.slots))

    def keep(self, offset: int, generation: int) -> None:
        """The block stays for as long as the pool: it is neither room nor in use."""
        block = self._find(offset, generation)
        self._lent_slots -= block.slots
        self.capacity_bytes -= block.slots * self._slot_bytes

    def reader_died(self, reader: int) -> None:
        """Its process is gone, and its work on the device with it: wait for its events no more.

        Call this when its pidfd says so, before its blocks are freed, and not on a timeout: a
        reader that is only late would read the next block's bytes. The number is free again.
        """
        old = self._read[reader]
        self._read[reader] = self._events(len(old))
        for event in old:
            self._driver.destroy_event(event)

    def close(self) -> None:
        """Give the memory back. No reader may have it open any more."""
        self._memory = None
        self.table.release()
        for event in [*self._written, *(event for events in self._read for event in events)]:
            self._driver.destroy_event(event)
        self._driver.free(self.device, self._base)

    def _events(self, count: int) -> list[Event]:
        return [self._driver.create_event(self.device) for _ in range(count)]

    def _settle(self) -> None:
        """Slots that nobody reads any more are free again."""
        if not self._draining:
            return
        left: list[tuple[int, int]] = []
        for slot, slots in self._draining:
            if all(self._driver.done(events[slot]) for events in self._read):
                self._free.give(slot, slots)
            else:
                left.append((slot, slots))
        self._draining = left

    def _mark(self, slot: int, slots: int, generation: int) -> None:
        for at in range(slot, slot + slots):
            self.table[at] = generation

    def _find(self, offset: int, generation: int) -> _Block:
        block = self._blocks.get(offset)
        if block is None or block.place.generation != generation:
            was = block.place.generation if block else "nothing"
            raise StaleRef(
                f"block {generation} at {offset} of pool {self.id} is gone: it holds {was}"
            )
        return block

    def _span(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._slot_bytes))


def _slot_bytes(capacity_bytes: int) -> int:
    least = -(-capacity_bytes // MAX_SLOTS)
    return -(-least // _LEAST_SLOT_BYTES) * _LEAST_SLOT_BYTES
