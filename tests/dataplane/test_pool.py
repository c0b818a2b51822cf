"""A device pool between processes: blocks, events, deaths; then any schedule."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from omni_rt.errors import ProtocolError, StaleRef
from omni_rt.wire.tensors import DeviceBlock
from omni_rt_workers.cuda.pool import GRANULE_BYTES, DevicePool, Place
from omni_rt_workers.cuda.reader import DevicePoolReader
from tests.dataplane.device_world import Buffer, run
from tests.dataplane.fake_driver import FakeDriver, FakeMachine

SLOT = GRANULE_BYTES // 8
SEEDS = 300  # more: `python -m tests.dataplane --seeds 100000`
PARTS = 4


class Bench:
    """A pool of eight slots on A, two readers of it, streams that only do what they are told."""

    def __init__(self) -> None:
        self.machine = FakeMachine(("A", "B"), peers=[("B", "A")])
        self.writer = self.machine.process("writer")
        self.table = bytearray(8 * GRANULE_BYTES // SLOT)
        self.pool = DevicePool(
            self.writer, 7, "A", 1000, readers=2, epoch=3, slot_bytes=SLOT,
            table=memoryview(self.table),
        )  # fmt: skip
        self.drivers = [self.machine.process(f"reader {number}") for number in range(2)]
        self.readers = [
            self.attach(driver, number, device)
            for number, (driver, device) in enumerate(zip(self.drivers, "AB", strict=True))
        ]
        self.sources: list[Buffer] = []
        self.writes = self.writer.new_stream("A")
        self.reads = [self.drivers[0].new_stream("A"), self.drivers[1].new_stream("B")]

    def attach(self, driver: FakeDriver, number: int, device: str) -> DevicePoolReader:
        table = memoryview(self.table)
        return DevicePoolReader.attach(driver, self.pool.attachment(number), device, table)

    def reserve(self, nbytes: int) -> Place:
        place = self.pool.reserve(nbytes, self.writes)
        assert place
        return place

    def send(self, data: bytes) -> DeviceBlock:
        place = self.reserve(len(data))
        source = Buffer(data)
        self.sources.append(source)  # the copy comes later
        self.writer.copy(place.address, source.address, len(data), self.writes)
        self.pool.publish(place)
        return _ref(place)

    def read(self, ref: DeviceBlock, reader: int = 0) -> Buffer:
        block = self.readers[reader].open(ref, self.reads[reader])
        target = Buffer(bytes(ref.nbytes))
        self.drivers[reader].copy(target.address, block.address, ref.nbytes, self.reads[reader])
        block.release()
        return target


def _key(ref: DeviceBlock) -> tuple[int, int]:
    return ref.offset, ref.generation


def _ref(place: Place) -> DeviceBlock:
    shape = (place.nbytes,)
    return DeviceBlock(7, place.offset, place.generation, place.slot, "uint8", shape)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_block_reaches_every_reader_before_anyone_waits_on_the_host(bench: Bench) -> None:
    ref = bench.send(b"hello")
    first, second = bench.read(ref, 0), bench.read(ref, 1)
    bench.pool.free(ref.offset, ref.generation)
    assert bench.pool.in_use_bytes == SLOT, "nothing has happened yet: it is still to be read"
    other = bench.send(b"other")
    assert other.offset != ref.offset
    bench.machine.drain()
    later = bench.send(b"later")
    assert later.offset == ref.offset
    third = bench.read(later, 1)
    bench.machine.drain()
    assert [buffer.bytes for buffer in (first, second, third)] == [b"hello", b"hello", b"later"]


def test_the_pool_is_whole_granules_and_counts_whole_slots(bench: Bench) -> None:
    assert bench.pool.capacity_bytes == GRANULE_BYTES
    places = [bench.reserve(nbytes) for nbytes in (0, 1, SLOT, SLOT + 1)]
    assert bench.pool.in_use_bytes == 5 * SLOT
    assert len(bench.pool) == 4
    assert bench.pool.reserve(4 * SLOT, bench.writes) is None
    for place in places:
        bench.pool.free(place.offset, place.generation)
    assert (bench.pool.in_use_bytes, len(bench.pool)) == (0, 0)
    assert bench.reserve(GRANULE_BYTES).address == places[0].address
    assert bench.pool.fits(GRANULE_BYTES)
    assert not bench.pool.fits(GRANULE_BYTES + 1)


def test_handles_are_opened_and_events_made_once(bench: Bench) -> None:
    before = [driver.created_events for driver in (bench.writer, *bench.drivers)]
    assert before == [8 * 3, 0, 0]
    for _ in range(50):
        ref = bench.send(b"again")
        bench.read(ref, 0)
        bench.read(ref, 1)
        bench.pool.free(ref.offset, ref.generation)
        bench.machine.drain()
    assert [driver.created_events for driver in (bench.writer, *bench.drivers)] == before
    assert [driver.opens for driver in bench.drivers] == [1, 1]
    assert [driver.live_events for driver in bench.drivers] == [16, 16]


def test_the_tensor_of_a_block_is_the_pools_memory(bench: Bench) -> None:
    place = bench.reserve(16)
    bench.pool.tensor(place).copy_(torch.arange(16, dtype=torch.uint8))
    bench.pool.publish(place)
    bench.machine.drain()
    block = bench.readers[0].open(_ref(place), bench.reads[0])
    assert block.tensor().view(torch.int32).tolist()[0] == 0x03020100
    assert block.tensor().data_ptr() == bench.pool.tensor(place).data_ptr()
    block.release()


def test_a_block_is_published_and_freed_once(bench: Bench) -> None:
    place = bench.reserve(1)
    bench.pool.publish(place)
    with pytest.raises(ProtocolError, match="published already"):
        bench.pool.publish(place)
    bench.pool.free(place.offset, place.generation)
    with pytest.raises(StaleRef):
        bench.pool.free(place.offset, place.generation)
    with pytest.raises(StaleRef):
        bench.pool.publish(place)


@pytest.mark.parametrize("reused", [False, True])
def test_a_ref_to_a_block_that_is_gone_is_found_out(bench: Bench, reused: bool) -> None:
    old = bench.send(b"old" * SLOT)  # three slots
    lent = bench.readers[0].open(old, bench.reads[0])
    bench.pool.free(old.offset, old.generation)
    if reused:
        bench.pool.free(*_key(bench.send(b"a")))
        bench.machine.drain()
        first, second = bench.send(b"b"), bench.send(b"c")
        assert (first.slot, second.slot) == (0, 1)
    with pytest.raises(StaleRef, match="slot 0 holds"):
        bench.readers[0].open(old, bench.reads[0])
    with pytest.raises(StaleRef, match="is gone"):
        bench.readers[0].check(lent.ref)


def test_a_ref_is_stale_if_only_its_last_slot_was_used_again(bench: Bench) -> None:
    old = bench.send(b"xy" * SLOT)
    bench.pool.free(old.offset, old.generation)
    bench.machine.drain()
    bench.send(b"a"), bench.send(b"b")
    bench.table[:8] = old.generation.to_bytes(8, "little")
    with pytest.raises(StaleRef, match="slot 1 holds"):
        bench.readers[0].open(old, bench.reads[0])


def test_a_released_block_is_not_used_again(bench: Bench) -> None:
    block = bench.readers[0].open(bench.send(b"x"), bench.reads[0])
    assert bench.readers[0].open_blocks == 1
    block.release()
    for use in (block.release, block.tensor, lambda: block.use_on(99)):
        with pytest.raises(StaleRef, match="was released"):
            use()
    assert bench.readers[0].open_blocks == 0


@pytest.mark.parametrize(
    ("offset", "slot", "nbytes"), [(GRANULE_BYTES, 0, 1), (0, 8, 1), (0, -1, 1), (-1, 0, 1)]
)
def test_a_ref_outside_the_pool_is_refused(
    bench: Bench, offset: int, slot: int, nbytes: int
) -> None:
    ref = DeviceBlock(7, offset, 3 << 40 | 1, slot, "uint8", (nbytes,))
    with pytest.raises(ProtocolError, match="not in pool 7"):
        bench.readers[0].open(ref, bench.reads[0])


def test_what_a_reader_still_has_to_read_holds_no_stream_of_the_writers(bench: Bench) -> None:
    ref = bench.send(b"first" * SLOT)
    bench.machine.drain()
    bench.read(ref)  # given to its stream, and back: nothing of it has been done
    bench.pool.free(ref.offset, ref.generation)
    assert bench.pool.draining
    assert bench.pool.reserve(GRANULE_BYTES, bench.writes) is None
    bench.machine.kill("reader 0")
    assert bench.pool.reserve(GRANULE_BYTES, bench.writes) is None, "its process may still read"
    bench.pool.reader_died(0)
    again = bench.reserve(GRANULE_BYTES)
    assert not bench.pool.draining
    assert not bench.machine.doomed()
    bench.pool.free(again.offset, again.generation)


def test_what_is_kept_is_no_room(bench: Bench) -> None:
    ref = bench.send(b"noise")
    bench.pool.keep(ref.offset, ref.generation)
    assert (bench.pool.in_use_bytes, bench.pool.capacity_bytes) == (0, GRANULE_BYTES - SLOT)
    assert not bench.pool.fits(GRANULE_BYTES)
    assert bench.pool.fits(GRANULE_BYTES - SLOT)


def test_a_dead_readers_slots_are_free_without_its_event(bench: Bench) -> None:
    ref = bench.send(b"first")
    bench.machine.drain()
    bench.readers[0].open(ref, bench.reads[0])
    bench.machine.kill("reader 0")
    bench.pool.reader_died(0)
    bench.pool.free(ref.offset, ref.generation)
    driver = bench.machine.process("reader 0 again")
    bench.drivers[0], bench.reads[0] = driver, driver.new_stream("A")
    bench.readers[0] = bench.attach(driver, 0, "A")
    got = bench.read(bench.send(b"second"))
    bench.machine.drain()
    assert got.bytes == b"second"


def test_closing_leaves_no_memory_and_no_event(bench: Bench) -> None:
    bench.read(bench.send(b"x"))
    for reader in bench.readers:
        reader.close()
    bench.pool.close()
    assert bench.machine.allocations == {}
    assert bench.machine.mappings == {}
    assert [driver.live_events for driver in (bench.writer, *bench.drivers)] == [0, 0, 0]


@pytest.mark.parametrize("part", range(PARTS))
def test_in_no_schedule_is_a_wrong_byte_seen_or_a_slot_lost(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        try:
            counts += run(seed)
        except AssertionError as error:
            raise AssertionError(f"python -m tests.dataplane {seed}: {error}") from error
    # The run is worth something only if all of this really happened.
    assert {"produced", "read", "full", "abandoned", "died", "writer died"} <= set(counts)
    assert counts["read"] > 5 * SEEDS / PARTS
