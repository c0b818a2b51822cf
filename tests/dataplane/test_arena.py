"""One sealed memfd, one writer, any number of readers, and what happens when one of them dies."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from omni_rt.errors import OmniError, ProtocolError, StaleRef
from omni_rt.wire.arena import HEADER_BYTES, Arena, BlockReader, BlockWriter, Reservation

SIZE = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, SIZE)
    yield arena
    arena.close()


def _reserve(writer: BlockWriter, nbytes: int) -> Reservation:
    place = writer.reserve(nbytes)
    assert place
    return place


# ---- blocks


def test_a_reader_sees_what_was_written(arena: Arena) -> None:
    place = _reserve(BlockWriter(arena, epoch=1), 5)
    place.view[:] = b"hello"
    assert bytes(BlockReader(arena).open(place.offset, place.generation, 5)) == b"hello"


def test_an_empty_block_is_a_block(arena: Arena) -> None:
    writer = BlockWriter(arena, epoch=1)
    places = [_reserve(writer, 0) for _ in range(3)]
    assert len({place.offset for place in places}) == 3
    for place in places:
        assert bytes(BlockReader(arena).open(place.offset, place.generation, 0)) == b""
        writer.free(place.offset, place.generation)
    assert writer.in_use_bytes == 0


def test_a_full_arena_says_none_and_has_room_again_after_a_free(arena: Arena) -> None:
    writer = BlockWriter(arena, epoch=1)
    place = _reserve(writer, SIZE - HEADER_BYTES)
    assert writer.fits(SIZE - HEADER_BYTES)
    assert not writer.fits(SIZE - HEADER_BYTES + 1)
    assert writer.reserve(0) is None
    writer.free(place.offset, place.generation)
    assert writer.reserve(SIZE - HEADER_BYTES)


def test_a_freed_block_is_stale(arena: Arena) -> None:
    writer, reader = BlockWriter(arena, epoch=1), BlockReader(arena)
    place = _reserve(writer, 100)
    writer.free(place.offset, place.generation)
    with pytest.raises(StaleRef):
        reader.open(place.offset, place.generation, 100)


def test_a_reused_block_is_stale_for_the_old_ref_only(arena: Arena) -> None:
    writer, reader = BlockWriter(arena, epoch=1), BlockReader(arena)
    old = _reserve(writer, 100)
    writer.free(old.offset, old.generation)
    new = _reserve(writer, 100)
    assert new.offset == old.offset
    reader.open(new.offset, new.generation, 100)
    with pytest.raises(StaleRef):
        reader.open(old.offset, old.generation, 100)
    with pytest.raises(StaleRef):
        reader.check(old.offset, old.generation)


def test_a_block_is_freed_once(arena: Arena) -> None:
    writer = BlockWriter(arena, epoch=1)
    place = _reserve(writer, 100)
    writer.free(place.offset, place.generation)
    with pytest.raises(StaleRef):
        writer.free(place.offset, place.generation)
    newer = _reserve(writer, 100)
    with pytest.raises(StaleRef):
        writer.free(place.offset, place.generation)
    writer.free(newer.offset, newer.generation)
    assert writer.in_use_bytes == 0


def test_a_restarted_writer_reuses_no_generation(arena: Arena) -> None:
    first = _reserve(BlockWriter(arena, epoch=1), 10)
    second = _reserve(BlockWriter(arena, epoch=2), 10)
    assert second.offset == first.offset
    with pytest.raises(StaleRef):
        BlockReader(arena).open(first.offset, first.generation, 10)


def test_a_ref_past_its_block_or_the_arena_is_refused(arena: Arena) -> None:
    writer, reader = BlockWriter(arena, epoch=1), BlockReader(arena)
    place = _reserve(writer, 100)
    with pytest.raises(ProtocolError, match="101 bytes names a block of 100"):
        reader.open(place.offset, place.generation, 101)
    for offset in (0, SIZE + HEADER_BYTES, -HEADER_BYTES):
        with pytest.raises(ProtocolError, match="outside"):
            reader.open(offset, place.generation, 1)


def test_poison_overwrites_a_freed_block(arena: Arena) -> None:
    writer = BlockWriter(arena, epoch=1, poison=True)
    place = _reserve(writer, 100)
    place.view[:] = bytes(100)
    writer.free(place.offset, place.generation)
    assert bytes(place.view) == b"\xa5" * 100


# ---- the memory


def test_offsets_above_two_gibibytes() -> None:
    # Not `create`, which would reserve all of it: only the touched pages of this one exist.
    size = 3 << 30
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    arena = Arena(1, fd, size, writable=True)
    try:
        writer = BlockWriter(arena, epoch=1)
        _reserve(writer, (2 << 30) + 5)
        place = _reserve(writer, 4)
        assert place.offset > 2 << 30
        place.view[:] = b"high"
        assert bytes(BlockReader(arena).open(place.offset, place.generation, 4)) == b"high"
    finally:
        arena.close()


def test_an_arena_is_whole_pages_and_can_be_touched_before_use() -> None:
    arena = Arena.create(1, 5000)
    try:
        assert arena.size_bytes == 8192
        arena.populate(write=True)
        arena.populate(write=False)
        assert bytes(arena.view(0, 8192)) == bytes(8192)
    finally:
        arena.close()


def test_an_arena_larger_than_the_machine_is_refused_with_the_number() -> None:
    fds = os.listdir("/proc/self/fd")
    with pytest.raises(OmniError, match=f"no room for an arena of {1 << 60} bytes") as caught:
        Arena.create(1, 1 << 60)
    assert caught.value.hint
    assert "`arena`" in caught.value.hint
    assert os.listdir("/proc/self/fd") == fds


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_an_arena_that_finds_no_memory_is_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    arena = Arena.create(1, SIZE)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OmniError, match=f"no room for an arena of {SIZE} bytes"):
        arena.populate(write=True)
    arena.close()


def test_an_arena_larger_than_what_is_free_is_refused_before_it_is_touched() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    arena = Arena.create(1, total - (1 << 20))  # less than there is, more than is free
    with pytest.raises(OmniError, match="are available"):
        arena.populate(write=True)
    arena.close()


def test_a_closed_arena_gives_no_more_views_and_keeps_those_it_gave() -> None:
    fds = os.listdir("/proc/self/fd")
    arena = Arena.create(1, SIZE)
    view = arena.view(0, 4)
    view[:] = b"kept"
    arena.close()
    arena.close()
    assert bytes(view) == b"kept"
    with pytest.raises(ProtocolError, match="closed"):
        arena.view(0, 4)
    del view, arena
    assert os.listdir("/proc/self/fd") == fds


@pytest.mark.parametrize("kind", ["unsealed", "short", "a pipe"])
def test_attach_takes_only_sealed_memory_of_the_size(kind: str) -> None:
    fds = os.listdir("/proc/self/fd")
    if kind == "a pipe":
        fd, other = os.pipe()
        os.close(other)
    elif kind == "short":
        small = Arena.create(1, SIZE // 2)
        fd = os.dup(small.fd)
        small.close()
    else:
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE)
    with pytest.raises(ProtocolError, match="sealed"):
        Arena.attach(1, fd, SIZE, writable=False)
    assert os.listdir("/proc/self/fd") == fds


# ---- other processes

_OTHER = """
import os, socket, sys
from omni_rt.wire.arena import Arena, BlockReader, BlockWriter
lifeline = socket.socket(fileno=int(sys.argv[1]))
message, fds, _, _ = socket.recv_fds(lifeline, 64, 1)
arena = Arena.attach(1, fds[0], int(message), writable=True)
"""


class _Other:
    """Another process that runs `code` with `arena` mapped and talks over `socket`."""

    def __init__(self, arena: Arena, code: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _OTHER + code, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
            )
        socket.send_fds(self.socket, [b"%d" % arena.size_bytes], [arena.fd])

    def __enter__(self) -> _Other:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


def test_another_process_sees_the_bytes(arena: Arena) -> None:
    place = _reserve(BlockWriter(arena, epoch=1), 5)
    place.view[:] = b"hello"
    code = f"lifeline.send(BlockReader(arena).open({place.offset}, {place.generation}, 5))"
    with _Other(arena, code) as other:
        assert other.socket.recv(64) == b"hello"


def test_nobody_can_change_the_size(arena: Arena) -> None:
    code = """
for size in (0, arena.size_bytes * 2):
    try:
        os.ftruncate(arena.fd, size)
    except OSError as error:
        lifeline.send(str(error.errno).encode())
"""
    with _Other(arena, code) as other:
        assert [other.socket.recv(64) for _ in range(2)] == [str(errno.EPERM).encode()] * 2
    assert os.fstat(arena.fd).st_size == SIZE


def test_what_a_killed_writer_wrote_stays_readable(arena: Arena) -> None:
    code = """
import struct
place = BlockWriter(arena, 1).reserve(1 << 16)
place.view[:] = b"w" * (1 << 16)
lifeline.send(struct.pack("qq", place.offset, place.generation))
lifeline.recv(1)
"""
    with _Other(arena, code) as other:
        offset, generation = struct.unpack("qq", other.socket.recv(64))
        reader = BlockReader(arena)
        before = reader.open(offset, generation, 1 << 16)
        other.process.send_signal(signal.SIGKILL)
        assert other.process.wait() == -signal.SIGKILL
        after = reader.open(offset, generation, 1 << 16)
        assert before == after == b"w" * (1 << 16)


def test_a_new_process_inherits_no_arena_and_no_file_is_left(arena: Arena) -> None:
    named = os.listdir("/dev/shm")
    received = Arena.attach(2, os.dup(arena.fd), SIZE, writable=False)
    try:
        links = subprocess.run(
            ["ls", "-l", "/proc/self/fd"],
            close_fds=False,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "omni-rt" not in links.stdout
        assert os.listdir("/dev/shm") == named
    finally:
        received.close()


def test_a_received_descriptor_is_not_inheritable(arena: Arena) -> None:
    fd = os.dup(arena.fd)
    os.set_inheritable(fd, True)  # as `socket.recv_fds` gives it
    received = Arena.attach(2, fd, SIZE, writable=False)
    try:
        assert not os.get_inheritable(received.fd)
    finally:
        received.close()
    assert not os.get_inheritable(arena.fd)
