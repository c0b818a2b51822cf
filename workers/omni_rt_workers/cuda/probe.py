"""Trying a way for real: one MiB of noise from end to end, compared byte by byte.

The producer `offer`s, its ref travels as any other, the consumer `take`s. Both know the noise by
its seed, so nothing but the ref need travel.
"""

from __future__ import annotations

import ctypes
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from omni_rt.errors import OmniError
from omni_rt.wire.arena import BlockReader, BlockWriter
from omni_rt.wire.tensors import Block, DeviceBlock
from omni_rt_workers.cuda.driver import Address, DeviceDriver, Stream
from omni_rt_workers.cuda.pool import DevicePool
from omni_rt_workers.cuda.reader import DevicePoolReader
from omni_rt_workers.cuda.route import Attempt

PROBE_BYTES = 1 << 20

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Offer:
    """A block of noise that waits for its consumer. `take_back` when that one has answered."""

    ref: Block | DeviceBlock
    take_back: Callable[[], None]


def offer_device(pool: DevicePool, driver: DeviceDriver, stream: Stream, seed: int) -> Offer:
    """Not waited for here: that the event orders it is part of what is tried."""
    source = _Host(_noise(seed))
    place = pool.reserve(PROBE_BYTES, stream)
    if place is None:
        raise OmniError(f"pool {pool.id} has no room for a probe of {PROBE_BYTES} bytes")
    driver.copy(place.address, source.address, PROBE_BYTES, stream)
    pool.publish(place)

    def take_back() -> None:
        driver.synchronize(stream)  # the copy reads from `source` until then
        assert source.address
        pool.free(place.offset, place.generation)

    shape = (PROBE_BYTES,)
    ref = DeviceBlock(pool.id, place.offset, place.generation, place.slot, "uint8", shape)
    return Offer(ref, take_back)


def take_device(
    reader: DevicePoolReader,
    driver: DeviceDriver,
    stream: Stream,
    ref: DeviceBlock,
    seed: int,
    clock: Clock = time.perf_counter,
) -> Attempt:
    """The consumer's side: over `DEVICE` and `PEER` alike."""
    target = _Host(bytes(PROBE_BYTES))
    try:
        started = clock()
        block = reader.open(ref, stream)
        driver.copy(target.address, block.address, PROBE_BYTES, stream)
        block.release()
        driver.synchronize(stream)
    except OmniError as error:
        return Attempt(str(error))
    return _compare(target.data, seed, clock() - started)


def offer_block(writer: BlockWriter, arena_id: int, seed: int) -> Offer:
    place = writer.reserve(PROBE_BYTES)
    if place is None:
        raise OmniError(f"arena {arena_id} has no room for a probe of {PROBE_BYTES} bytes")
    place.view[:] = _noise(seed)
    ref = Block(arena_id, place.offset, place.generation, "uint8", (PROBE_BYTES,))
    return Offer(ref, lambda: writer.free(place.offset, place.generation))


def take_block(
    reader: BlockReader, ref: Block, seed: int, clock: Clock = time.perf_counter
) -> Attempt:
    """Over `SHARED`: read where it lies."""
    started = clock()
    try:
        view = reader.open(ref.offset, ref.generation, ref.nbytes)
    except OmniError as error:
        return Attempt(str(error))
    return _compare(view, seed, clock() - started)


def take_pinned(
    reader: BlockReader,
    driver: DeviceDriver,
    device: str,
    stream: Stream,
    ref: Block,
    seed: int,
    clock: Clock = time.perf_counter,
) -> Attempt:
    """Over `PINNED`: onto the consumer's device, from the arena that the caller has pinned."""
    target = _Host(bytes(PROBE_BYTES))
    try:
        view = reader.open(ref.offset, ref.generation, ref.nbytes)
        memory = driver.allocate(device, PROBE_BYTES)
        try:
            started = clock()
            driver.copy(memory, address_of(view), PROBE_BYTES, stream)
            driver.synchronize(stream)
            took_s = clock() - started
            driver.copy(target.address, memory, PROBE_BYTES, stream)
            driver.synchronize(stream)
        finally:
            driver.free(device, memory)
    except OmniError as error:
        return Attempt(str(error))
    return _compare(target.data, seed, took_s)


def address_of(view: memoryview) -> Address:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Host:
    """Ordinary memory with an address."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.address = address_of(memoryview(self.data))


def _noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(PROBE_BYTES)


def _compare(got: bytearray | memoryview, seed: int, took_s: float) -> Attempt:
    want, found = zlib.crc32(_noise(seed)), zlib.crc32(got)
    if found != want:
        return Attempt(f"other bytes arrived than were sent (crc32 {found:08x}, not {want:08x})")
    return Attempt(took_s=took_s)
