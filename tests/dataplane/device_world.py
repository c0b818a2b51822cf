"""One writer, a few readers, and a schedule drawn from a seed: who does what next, and how late.

Main's part (who holds which block, when it may be freed) is played by `World` itself.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from omni_rt.wire.tensors import DeviceBlock
from omni_rt_workers.cuda import pool as pool_module
from omni_rt_workers.cuda.driver import Stream
from omni_rt_workers.cuda.pool import DevicePool, Place
from omni_rt_workers.cuda.reader import DevicePoolReader, OpenBlock
from tests.dataplane.fake_driver import POISON, FakeDriver, FakeMachine

SLOT_BYTES = 64
SLOTS = 8
LARGEST_BYTES = 3 * SLOT_BYTES


class Buffer:
    """Ordinary memory with an address."""

    def __init__(self, data: bytes) -> None:
        self._data = ctypes.create_string_buffer(data, len(data))
        self.address = ctypes.addressof(self._data)

    @property
    def bytes(self) -> bytes:
        return self._data.raw


@dataclass
class Reader:
    """One consumer process; a new one takes the number of one that died."""

    driver: FakeDriver
    pool: DevicePoolReader
    streams: list[Stream]
    inbox: list[DeviceBlock] = field(default_factory=list)
    open: list[OpenBlock] = field(default_factory=list)
    results: list[tuple[Buffer, bytes]] = field(default_factory=list)  # read, expected


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        pairs = [("A", "B"), ("B", "A")]
        self.machine = FakeMachine(("A", "B"), peers=pairs)
        self.driver = self.machine.process("writer")
        readers = rng.randint(1, 3)
        self.table = bytearray(8 * SLOTS)
        self.pool = DevicePool(
            self.driver, 1, "A", SLOTS * SLOT_BYTES,
            readers=readers, epoch=1, slot_bytes=SLOT_BYTES, table=memoryview(self.table),
        )  # fmt: skip
        self._lives: Counter[int] = Counter()
        self.writes = [self._stream(self.driver, "A") for _ in range(rng.randint(1, 2))]
        self.readers = [self._join(number) for number in range(readers)]
        self.others = readers  # in processes of their own
        own = [self._stream(self.driver, "A") for _ in range(2)]
        self.readers.append(Reader(self.driver, self.pool.own_reader(), own))
        self.content: dict[int, bytes] = {}  # generation -> what was written
        self.leases: dict[tuple[int, int], Counter[int]] = {}  # block -> by reader
        self.free_messages: list[tuple[int, int]] = []
        self.buffers: list[Buffer] = []  # a lazy copy still reads from its source
        self.counts: Counter[str] = Counter()

    def run(self, turns: int = 120) -> None:
        doings: list[tuple[Callable[[], None], int]] = [
            (self.produce, 6), (self.abandon, 1), (self.receive, 6), (self.release, 6),
            (self.take_free, 6), (self.reader_dies, 1), (self.work, 12),
        ]  # fmt: skip
        for _ in range(turns):
            self.rng.choices([d for d, _ in doings], [weight for _, weight in doings])[0]()
            assert "writer" not in self.machine.doomed(), "it waits for a dead reader"
        if self.rng.random() < 0.2:
            return self.writer_dies()
        return self.finish()

    # ---- the writer

    def produce(self) -> None:
        place = self._reserve()
        if place is None:
            self.counts["full"] += 1
            return
        data = self.rng.randbytes(place.nbytes)
        self._write(place, bytes([POISON]) * place.nbytes)
        self._write(place, data)
        self.pool.publish(place)
        self.content[place.generation] = data
        ref = DeviceBlock(1, place.offset, place.generation, place.slot, "uint8", (place.nbytes,))
        key = (place.offset, place.generation)
        self.leases[key] = Counter()
        count = self.rng.randint(0, len(self.readers))
        for number in self.rng.sample(range(len(self.readers)), count):
            for _ in range(self.rng.choice([1, 1, 2])):  # two stages of one worker
                self.leases[key][number] += 1
                self.readers[number].inbox.append(ref)
        self.counts["produced"] += 1
        self._settle(key)

    def abandon(self) -> None:
        """Reserved and partly written, then its request is aborted."""
        if place := self._reserve():
            self._write(place, bytes([POISON]) * place.nbytes)
            self.pool.free(place.offset, place.generation)
            self.counts["abandoned"] += 1

    def take_free(self) -> None:
        if self.free_messages:
            self.pool.free(*self.free_messages.pop(0))
            self.counts["freed"] += 1

    # ---- the readers

    def receive(self) -> None:
        reader = self.rng.choice(self.readers)
        if not reader.inbox:
            return
        ref = reader.inbox.pop(0)
        if self.rng.random() < 0.1:  # aborted before anyone looked at it
            self._returned(reader, ref)
            return
        block = reader.pool.open(ref, self.rng.choice(reader.streams))
        reader.open.append(block)
        self._read(reader, block)
        self.counts["read"] += 1

    def release(self) -> None:
        reader = self.rng.choice(self.readers)
        if not reader.open:
            return
        block = reader.open.pop(self.rng.randrange(len(reader.open)))
        if self.rng.random() < 0.3:  # read once more, perhaps elsewhere
            self._read(reader, block)
        block.release()
        self._returned(reader, block.ref)

    def reader_dies(self) -> None:
        if self.rng.random() > 0.2:
            return
        number = self.rng.randrange(self.others)
        self.machine.kill(self._name(number))
        self.pool.reader_died(number)
        for key, holders in list(self.leases.items()):
            if holders.pop(number, 0):
                self._settle(key)
        self.readers[number] = self._join(number)
        self.counts["died"] += 1

    # ---- the machine

    def work(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.machine.step(self.rng)

    def writer_dies(self) -> None:
        """Killed at any moment.

        A reader that waits for what the writer did not come to do is stuck and killed too; the
        others let go of the pool and live on.
        """
        self.machine.kill("writer")
        self.counts["writer died"] += 1
        while doomed := self.machine.doomed():
            for name in doomed:
                self.counts["reader stuck"] += 1
                self.machine.kill(name)
        alive = {stream.process for stream in self.machine.streams.values()}
        for number, reader in enumerate(self.readers):
            if self._name(number) in alive:
                for block in reader.open:
                    block.release()
                reader.pool.close()
                assert reader.driver.live_events == 0
        assert (self.machine.allocations, self.machine.mappings) == ({}, {})

    def finish(self) -> None:
        """Everybody ends in good order; then nothing may be left."""
        for reader in self.readers:
            while reader.inbox or reader.open:
                self.receive()
                self.release()
        while self.free_messages:
            self.take_free()
        self.machine.drain()
        for reader in self.readers:
            for buffer, expected in reader.results:
                assert buffer.bytes == expected, "a reader saw other bytes than were written"
            assert reader.pool.open_blocks == 0
            reader.pool.close()
        for reader in self.readers[: self.others]:
            assert (reader.driver.opens, reader.driver.live_events) == (1, 0)
        assert (self.pool.in_use_bytes, len(self.pool), self.leases) == (0, 0, {})
        whole = self.pool.reserve(SLOTS * SLOT_BYTES, self.writes[0])
        assert whole is not None, "slots did not come back"
        self.machine.drain()
        self.pool.close()
        assert (self.driver.live_events, self.machine.allocations) == (0, {})

    # ---- inside

    def _reserve(self) -> Place | None:
        return self.pool.reserve(self.rng.randint(1, LARGEST_BYTES), self.rng.choice(self.writes))

    def _write(self, place: Place, data: bytes) -> None:
        buffer = Buffer(data)
        self.buffers.append(buffer)
        self.driver.copy(place.address, buffer.address, place.nbytes, place.stream)

    def _read(self, reader: Reader, block: OpenBlock) -> None:
        stream = self.rng.choice(reader.streams)
        block.use_on(stream)
        buffer = Buffer(bytes(block.ref.nbytes))
        reader.driver.copy(buffer.address, block.address, block.ref.nbytes, stream)
        reader.results.append((buffer, self.content[block.ref.generation]))

    def _returned(self, reader: Reader, ref: DeviceBlock) -> None:
        key = (ref.offset, ref.generation)
        number = self.readers.index(reader)
        self.leases[key][number] -= 1
        self.leases[key] += Counter()  # drops what is zero
        self._settle(key)

    def _settle(self, key: tuple[int, int]) -> None:
        if not self.leases[key]:
            del self.leases[key]
            self.free_messages.append(key)

    def _stream(self, driver: FakeDriver, device: str) -> Stream:
        return driver.new_stream(device, weight=self.rng.choice([1, 10, 100]))

    def _join(self, number: int) -> Reader:
        self._lives[number] += 1
        device = self.rng.choice(["A", "B"])
        driver = self.machine.process(self._name(number))
        table = memoryview(self.table)
        pool = DevicePoolReader.attach(driver, self.pool.attachment(number), device, table)
        return Reader(driver, pool, [self._stream(driver, device) for _ in range(2)])

    def _name(self, number: int) -> str:
        return f"reader {number}.{self._lives[number]}"


def run(seed: int) -> Counter[str]:
    """What happened how often. Raises `AssertionError` if it was not right."""
    granule, pool_module.GRANULE_BYTES = pool_module.GRANULE_BYTES, SLOT_BYTES
    try:
        world = World(seed)
        world.run()
        return world.counts
    finally:
        pool_module.GRANULE_BYTES = granule
