"""Shared memory without a name: one sealed memfd per worker, one writer, any number of readers.

Main makes an arena before it spawns the worker and hands the descriptor over, so that no death of a
worker loses bytes that another still reads, and nothing is left in any folder, whoever dies. The
size is sealed: a peer that truncates would turn the next read into SIGBUS.

Every mapping is writable, a reader's too: torch has no read-only tensors and warns of memory that
it cannot write through. Readers read only, by contract.

A block is a 64-byte header and the payload, both on 64-byte boundaries. The header holds the
block's generation, which is never used twice: a reader that comes too late gets `StaleRef`, never
another block's bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from omni_rt.errors import OmniError, ProtocolError, StaleRef
from omni_rt.wire.spans import FreeSpans

HEADER_BYTES = 64
# Behind the blocks of a worker that has a device pool: 8 bytes for each slot of the pool.
TABLE_BYTES = 2048
_ALIGN_BYTES = 64
_MAGIC = 0x6F6D6E69  # "omni"
_HEADER = struct.Struct("<IIQQ")  # magic, unused, generation, payload bytes
_COUNTER_BITS = 40
_POISON = 0xA5

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 14, 22, 23


class Arena:
    """One mapping of an arena in this process. Owns its descriptor."""

    def __init__(self, arena_id: int, fd: int, size_bytes: int, *, writable: bool) -> None:
        self.id = arena_id
        self.fd = fd
        self.size_bytes = size_bytes
        self.writable = writable
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        # While a view is held, mmap.close() raises instead of pulling the memory away under it.
        self._view = memoryview(self._map)
        self._closed = False

    @classmethod
    def create(cls, arena_id: int, size_bytes: int) -> Arena:
        """A new, sealed arena. Takes no memory yet, and no time: its writer populates it.

        Raises `OmniError` if there is not that much memory.
        """
        size = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        if size > memory:  # a memfd knows no limit: the kernel would kill somebody first
            raise _no_room(size, f"this machine has {memory}")
        fd = os.memfd_create(f"omni-rt-{arena_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            return cls(arena_id, fd, size, writable=True)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, arena_id: int, fd: int, size_bytes: int, *, writable: bool) -> Arena:
        """Map an arena whose descriptor came from main. Takes the descriptor over."""
        os.set_inheritable(fd, False)
        try:
            actual = os.fstat(fd).st_size
            if actual < size_bytes or not _is_sealed(fd):
                raise ProtocolError(f"arena {arena_id} is not a sealed one of {size_bytes} bytes")
            return cls(arena_id, fd, actual, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    def __repr__(self) -> str:
        return f"<Arena {self.id} {self.size_bytes} bytes{' closed' if self._closed else ''}>"

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes, writable. As long as the view lives, so does the mapping.

        Raises `ProtocolError` for what lies outside, and after `close`.
        """
        if self._closed:
            raise ProtocolError(f"arena {self.id} is closed")
        # A slice past the end would be shorter without a word.
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size_bytes:
            raise ProtocolError(
                f"[{offset}, {offset + nbytes}) is outside arena {self.id} of {self.size_bytes}"
            )
        return self._view[offset : offset + nbytes]

    def populate(self, *, write: bool) -> None:
        """Touch every page once, so that no request pays for the first touch (4 times a copy).

        With `write`, in the arena's writer, this is where the memory is taken: raises `OmniError`
        if there is not that much. Takes some 0.6 s for each GiB.
        """
        if write:
            self._take_memory()
        with contextlib.suppress(OSError):
            self._map.madvise(_MADV_HUGEPAGE)
        try:
            self._map.madvise(_MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)
        except OSError:  # before Linux 5.14
            for offset in range(0, self.size_bytes, mmap.PAGESIZE):
                self._view[offset]

    def _take_memory(self) -> None:
        available = _available_bytes()
        if self.size_bytes > available:  # the kernel would give it, and kill somebody later
            raise _no_room(self.size_bytes, f"{available} are available")
        try:
            os.posix_fallocate(self.fd, 0, self.size_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _no_room(self.size_bytes, os.strerror(error.errno)) from error
            raise

    def close(self) -> None:
        """Unmap, unless views of it are still in use: then it goes with the last of them.

        Views and tensors that live on stay what they are: no memory goes from under them.
        """
        if self._closed:
            return
        self._closed = True
        os.close(self.fd)
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A block that was reserved and not freed yet."""

    offset: int  # of the payload
    nbytes: int
    generation: int
    view: memoryview  # the payload, writable


class BlockWriter:
    """The allocator of an arena, or of its first `size_bytes`, in its one writing process."""

    def __init__(
        self, arena: Arena, epoch: int, *, size_bytes: int | None = None, poison: bool = False
    ) -> None:
        self._arena = arena
        self._generation = epoch << _COUNTER_BITS
        self._poison = poison
        self._blocks: dict[int, tuple[int, int, int]] = {}  # payload offset -> generation, n, span
        self.capacity_bytes = size_bytes or arena.size_bytes
        self._free = FreeSpans(self.capacity_bytes)
        self.in_use_bytes = 0  # headers and padding included

    def __repr__(self) -> str:
        return f"<BlockWriter {self.in_use_bytes} of {self.capacity_bytes} bytes in use>"

    def __len__(self) -> int:
        return len(self._blocks)

    def fits(self, nbytes: int) -> bool:
        """Whether a payload of that size fits the empty arena."""
        return _span(nbytes) <= self.capacity_bytes

    def reserve(self, nbytes: int) -> Reservation | None:
        """A block to write into, or None if there is no room for it now."""
        span = _span(nbytes)
        start = self._free.take(span)
        if start is None:
            return None
        self._generation += 1
        self.in_use_bytes += span
        offset = start + HEADER_BYTES
        _HEADER.pack_into(
            self._arena.view(start, HEADER_BYTES), 0, _MAGIC, 0, self._generation, nbytes
        )
        self._blocks[offset] = (self._generation, nbytes, span)
        return Reservation(offset, nbytes, self._generation, self._arena.view(offset, nbytes))

    def free(self, offset: int, generation: int) -> None:
        """Give a block back. Raises `StaleRef` if it is not that block any more."""
        found = self._blocks.get(offset)
        if found is None or found[0] != generation:
            was = found[0] if found else "nothing"
            raise StaleRef(f"block {generation} at {offset} is not there to free: it holds {was}")
        _, nbytes, span = self._blocks.pop(offset)
        start = offset - HEADER_BYTES
        _HEADER.pack_into(self._arena.view(start, HEADER_BYTES), 0, _MAGIC, 0, 0, 0)
        if self._poison:
            self._arena.view(offset, nbytes)[:] = bytes([_POISON]) * nbytes
        self.in_use_bytes -= span
        self._free.give(start, span)


class BlockReader:
    """Opens blocks of an arena, in any process that has mapped it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def open(self, offset: int, generation: int, nbytes: int) -> memoryview:
        """The payload, to be read only. Raises `StaleRef` if the block was freed or reused."""
        written = self.check(offset, generation)
        if nbytes > written:
            raise ProtocolError(f"a ref of {nbytes} bytes names a block of {written}")
        return self._arena.view(offset, nbytes)

    def check(self, offset: int, generation: int) -> int:
        """The payload's bytes. Raises `StaleRef` if the block was freed or reused."""
        header = self._arena.view(offset - HEADER_BYTES, HEADER_BYTES)
        magic, _, found, nbytes = _HEADER.unpack_from(header)
        if magic != _MAGIC or found != generation:
            raise StaleRef(
                f"block at {offset} of arena {self._arena.id} holds generation {found}, "
                f"not {generation}: it was freed while somebody still had a ref"
            )
        return int(nbytes)


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no memfd at all
        return False


def _available_bytes() -> int:
    """Memory that can be taken: of the machine, and of the control group if it has a limit."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or its limit is "max"
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available


def _no_room(size_bytes: int, why: str) -> OmniError:
    return OmniError(
        f"there is no room for an arena of {size_bytes} bytes of shared memory: {why}",
        hint="lower the stage's `arena`, or free memory",
    )


def _span(nbytes: int) -> int:
    return HEADER_BYTES + -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
