"""Trying a way for real: one MiB of noise from end to end, compared byte by byte.

The producer `offer`s, its ref travels as any other, the consumer `take`s. Both know the noise by
its seed, the pool's id, so nothing but the ref need travel. A pool keeps its noise for every reader
that comes; a small pool has less of it.
"""

from __future__ import annotations

import ctypes
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from omni_rt.errors import OmniError
from omni_rt.wire.tensors import DeviceBlock
from omni_rt_workers.cuda.driver import Address, DeviceDriver, Stream
from omni_rt_workers.cuda.pool import DevicePool
from omni_rt_workers.cuda.reader import DevicePoolReader

PROBE_BYTES = 1 << 20

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Attempt:
    """How it went."""

    problem: str | None = None  # None: every byte arrived
    took_s: float | None = None


def offer_device(pool: DevicePool, driver: DeviceDriver, stream: Stream) -> DeviceBlock:
    """Noise at the beginning of an empty pool, for as long as the pool is there."""
    nbytes = min(PROBE_BYTES, pool.capacity_bytes // 4)
    source = _Host(_noise(pool.id, nbytes))
    place = pool.reserve(nbytes, stream)
    assert place is not None, "the pool is empty"
    driver.copy(place.address, source.address, nbytes, stream)
    pool.publish(place)
    driver.synchronize(stream)  # the copy reads from `source` until then
    assert source.address
    pool.keep(place.offset, place.generation)
    return DeviceBlock(pool.id, place.offset, place.generation, place.slot, "uint8", (nbytes,))


def take_device(
    reader: DevicePoolReader,
    driver: DeviceDriver,
    stream: Stream,
    ref: DeviceBlock,
    clock: Clock = time.perf_counter,
) -> Attempt:
    """The consumer's side, of the same device or of a peer."""
    target = _Host(bytes(ref.nbytes))
    try:
        started = clock()
        block = reader.open(ref, stream)
        driver.copy(target.address, block.address, ref.nbytes, stream)
        block.release()
        driver.synchronize(stream)
    except OmniError as error:
        return Attempt(str(error))
    return _compare(target.data, ref.pool, clock() - started)


class _Host:
    """Ordinary memory with an address."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.address: Address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))


def _noise(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def _compare(got: bytearray, seed: int, took_s: float) -> Attempt:
    want, found = zlib.crc32(_noise(seed, len(got))), zlib.crc32(got)
    if found != want:
        return Attempt(f"other bytes arrived than were sent (crc32 {found:08x}, not {want:08x})")
    return Attempt(took_s=took_s)
