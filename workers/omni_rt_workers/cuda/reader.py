"""A reader's side of a device pool: opened once, read in place, ordered by events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_rt.errors import ProtocolError, StaleRef
from omni_rt.wire.messages import AttachPool
from omni_rt.wire.tensors import DeviceBlock
from omni_rt_workers.cuda.driver import Address, DeviceDriver, Event, Stream

if TYPE_CHECKING:
    import torch


class DevicePoolReader:
    """One process's view of a pool, on `device`: the pool's own or a peer of it.

    `written` and `read` are the slots' events, in this process's numbers, and `table` says which
    generation lies in each slot: the writer keeps it, in shared memory.
    """

    def __init__(
        self,
        driver: DeviceDriver,
        pool_id: int,
        device: str,
        base: Address,
        size_bytes: int,
        written: list[Event],
        read: list[Event],
        table: memoryview,
    ) -> None:
        self.id = pool_id
        self.device = device
        self.open_blocks = 0
        self._driver = driver
        self._size_bytes = size_bytes
        self._base = base
        self._written, self._read = written, read
        self._table = table
        self._slot_bytes = size_bytes // len(written)
        self._is_mapped = False  # by `attach`, so that it is ours to close
        self._recorded: dict[int, tuple[int, Stream]] = {}  # slot -> generation, stream
        self._streams: set[Stream] = set()  # all that ever read from here
        self._memory: torch.Tensor | None = None

    @classmethod
    def attach(
        cls, driver: DeviceDriver, message: AttachPool, device: str, table: memoryview
    ) -> DevicePoolReader:
        """Open another process's pool: once, for as long as that pool lives. `table`: bytes."""
        count, odd = divmod(len(message.events), 2)
        if odd or not 0 < 8 * count <= len(table):
            raise ProtocolError(f"pool {message.pool} has {len(message.events)} events, not pairs")
        base = driver.open(device, message.handle)
        # Opened where they are waited for: waiting for an event of another device's can hang.
        events = [driver.open_event(device, handle) for handle in message.events]
        size, seen = message.size_bytes, table[: 8 * count].cast("Q")
        written, read = events[:count], events[count:]
        reader = cls(driver, message.pool, device, base, size, written, read, seen)
        reader._is_mapped = True
        return reader

    def __repr__(self) -> str:
        return f"<DevicePoolReader {self.id} {self.open_blocks} blocks open>"

    def open(self, ref: DeviceBlock, stream: Stream) -> OpenBlock:
        """The block, for one lease on it: `release` what this returns.

        What `stream` is given from now on sees what was written. Raises `StaleRef` if the block was
        freed or its slots were used again.
        """
        self.check(ref)
        self.open_blocks += 1
        block = OpenBlock(self, ref, self._base + ref.offset)
        block.use_on(stream)
        return block

    def check(self, ref: DeviceBlock) -> None:
        """Raise `StaleRef` if the block was freed or its slots were used again."""
        end = ref.offset + ref.nbytes
        starts = ref.slot * self._slot_bytes == ref.offset
        if not (0 <= ref.slot < len(self._read) and starts and end <= self._size_bytes):
            raise ProtocolError(f"slot {ref.slot}, [{ref.offset}, {end}) is not in pool {self.id}")
        last = max(ref.offset, end - 1) // self._slot_bytes
        for slot in range(ref.slot, last + 1):
            if self._table[slot] != ref.generation:
                raise StaleRef(
                    f"block {ref.generation} of pool {self.id} is gone: "
                    f"slot {slot} holds {self._table[slot] or 'nothing'}"
                )

    def close(self) -> None:
        """Let go of the pool, before its writer may free it. Waits until nothing reads it."""
        for stream in self._streams:
            self._driver.synchronize(stream)
        self._memory = None
        if not self._is_mapped:
            return
        self._table.release()
        for event in [*self._written, *self._read]:
            self._driver.destroy_event(event)
        self._driver.close(self.device, self._base)

    def _wait(self, slot: int, stream: Stream) -> None:
        event = self._written[slot]
        if not self._driver.done(event):  # else nothing hangs on whether the writer lives
            self._driver.wait(event, stream)
        self._streams.add(stream)

    def _record(self, ref: DeviceBlock, stream: Stream) -> None:
        event = self._read[ref.slot]
        generation, before = self._recorded.get(ref.slot, (0, stream))
        if generation == ref.generation and before != stream:
            # An event stands for its last record only: this one must come after the one before.
            self._driver.wait(event, stream)
        self._driver.record(event, stream)
        self._recorded[ref.slot] = (ref.generation, stream)

    def _tensor(self, ref: DeviceBlock) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._driver.tensor(self.device, self._base, self._size_bytes)
        return self._memory[ref.offset : ref.offset + ref.nbytes]


class OpenBlock:
    """One lease on a block, and the streams on which it is read."""

    def __init__(self, reader: DevicePoolReader, ref: DeviceBlock, address: Address) -> None:
        self.ref = ref
        self.address = address
        self._reader: DevicePoolReader | None = reader
        self._streams: list[Stream] = []

    def use_on(self, stream: Stream) -> None:
        """The block is read on this stream too."""
        if stream not in self._streams:
            self._held()._wait(self.ref.slot, stream)
            self._streams.append(stream)

    def tensor(self) -> torch.Tensor:
        """As uint8: read only, valid until `release`, on the streams that it was opened for."""
        return self._held()._tensor(self.ref)

    def release(self) -> None:
        """Nothing that reads the block will be given to any stream any more.

        What was given may still be under way: the writer waits for it, through the event.
        """
        reader = self._held()
        for stream in self._streams:
            reader._record(self.ref, stream)
        reader.open_blocks -= 1
        self._reader = None

    def _held(self) -> DevicePoolReader:
        if self._reader is None:
            raise StaleRef(f"block {self.ref.generation} of pool {self.ref.pool} was released")
        return self._reader
