"""The control plane between main and workers: a socket pair for each worker, a frame a turn.

Each worker inherits one end of a unix stream socket: there is no address that could leak, be
guessed or be left behind, and the end of either process is the end of the stream. A frame is four
bytes of length, little-endian, and a msgpack array of messages. Main's end never blocks: it is
driven by the event loop, and what a worker does not take at once waits in memory, bounded by
admission and byte credits. A worker's end blocks. Why not ZeroMQ: docs/design.md, "Control plane".
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from omni_rt.errors import ProtocolError
from omni_rt.wire.messages import ToMain, ToWorker

# A frame above this size is refused by the receiver (which reads no further) and by the sender
# (which raises): bulk data belongs into an arena.
MAX_FRAME_BYTES = 32 << 20
_READ_BYTES = 64 << 10  # in one go; main then lets other callbacks of the loop have their turn
_LENGTH = 4

OnMessages = Callable[[str, list[ToMain]], None]
OnGarbage = Callable[[str, str], None]


class Channel(Protocol):
    """Main's end. Peers are named by identity: "worker.replica.epoch"."""

    def open(self, identity: str) -> socket.socket:
        """The end for a new worker to inherit. The caller closes it once the worker has it."""
        ...

    def forget(self, identity: str) -> None:
        """The worker is gone: what it had still sent is delivered, then its socket is closed."""
        ...

    def watch(self, on_messages: OnMessages, on_garbage: OnGarbage) -> None:
        """Call back from the running loop for all that arrives."""
        ...

    def send(self, identity: str, messages: Sequence[ToWorker]) -> bool:
        """Send one frame without blocking; False if the peer is not there."""
        ...

    def close(self) -> None: ...


class Frames:
    """Cuts what is read from a stream into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a frame
        self._need = 0  # bytes that `_rest` must have before there is a frame in it

    def cut(self, data: bytes | bytearray) -> list[memoryview]:
        """The frames that `data` completes. Raises `ProtocolError` for one that is too long."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return []
            data, self._rest = self._rest, bytearray()
        view = memoryview(data)
        frames: list[memoryview] = []
        at = 0
        while True:
            start = at + _LENGTH
            size = int.from_bytes(view[at:start], "little") if start <= len(view) else 0
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
            if start + size > len(view):
                self._rest, self._need = bytearray(view[at:]), _LENGTH + size
                return frames
            frames.append(view[start : start + size])
            at = start + size


def encode(encoder: msgspec.msgpack.Encoder, messages: Sequence[ToMain | ToWorker]) -> bytearray:
    """A frame with its length."""
    frame = bytearray(_LENGTH)
    encoder.encode_into(messages, frame, _LENGTH)
    frame[:_LENGTH] = (len(frame) - _LENGTH).to_bytes(_LENGTH, "little")
    return frame


@dataclass(eq=False, slots=True)
class _Peer:
    identity: str
    socket: socket.socket
    frames: Frames = field(default_factory=Frames)
    unsent: bytearray = field(default_factory=bytearray)  # its socket was full
    ended: bool = False  # nothing more can be read


class SocketChannel:
    """`Channel` over one stream socket for each worker."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[ToMain])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_messages: OnMessages = _ignore
        self._on_garbage: OnGarbage = _ignore

    def open(self, identity: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        peer = self._peers[identity] = _Peer(identity, ours)
        if self._loop is not None:
            self._loop.add_reader(ours.fileno(), self._read, peer)
        return theirs

    def forget(self, identity: str) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            return
        while not peer.ended and self._read(peer):
            pass
        self._close(peer)

    def watch(self, on_messages: OnMessages, on_garbage: OnGarbage) -> None:
        self._on_messages, self._on_garbage = on_messages, on_garbage
        self._loop = asyncio.get_running_loop()
        for peer in self._peers.values():
            self._loop.add_reader(peer.socket.fileno(), self._read, peer)

    def send(self, identity: str, messages: Sequence[ToWorker]) -> bool:
        peer = self._peers.get(identity)
        if peer is None:
            return False
        frame = encode(self._encoder, messages)
        size = len(frame) - _LENGTH
        if size > MAX_FRAME_BYTES:
            if len(messages) == 1:
                raise ProtocolError(f"a message of {size} bytes exceeds {MAX_FRAME_BYTES}")
            half = len(messages) // 2
            return self.send(identity, messages[:half]) and self.send(identity, messages[half:])
        return self._write(peer, frame)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._close(peer)
        self._loop = None

    # ---- one peer

    def _read(self, peer: _Peer) -> bool:
        """Take what one read gives; False if there was nothing."""
        try:
            data = peer.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it ended without having read all that it was sent
            data = b""
        if data:
            self._take(peer, data)
        else:
            self._end(peer)
        return bool(data)

    def _take(self, peer: _Peer, data: bytes) -> None:
        messages: list[ToMain] = []
        wrong: list[str] = []
        try:
            for frame in peer.frames.cut(data):
                try:
                    messages += self._decoder.decode(frame)
                except msgspec.MsgspecError as error:
                    wrong.append(str(error))
        except ProtocolError as error:  # where the next frame begins cannot be known
            wrong.append(str(error))
            self._end(peer)
        if messages:
            self._on_messages(peer.identity, messages)
        for what in wrong:
            self._on_garbage(peer.identity, what)

    def _write(self, peer: _Peer, frame: bytearray) -> bool:
        if peer.unsent:
            peer.unsent += frame
            return True
        try:
            sent = peer.socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:  # it is gone; its pidfd will say so
            return False
        if sent < len(frame):
            assert self._loop is not None
            peer.unsent += memoryview(frame)[sent:]
            self._loop.add_writer(peer.socket.fileno(), self._write_rest, peer)
        return True

    def _write_rest(self, peer: _Peer) -> None:
        assert self._loop is not None
        try:
            sent = peer.socket.send(peer.unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(peer.unsent)
        del peer.unsent[:sent]
        if not peer.unsent:
            self._loop.remove_writer(peer.socket.fileno())

    def _end(self, peer: _Peer) -> None:
        peer.ended = True
        if self._loop is not None:
            self._loop.remove_reader(peer.socket.fileno())

    def _close(self, peer: _Peer) -> None:
        if self._loop is not None:
            self._loop.remove_reader(peer.socket.fileno())
            self._loop.remove_writer(peer.socket.fileno())
        peer.ended = True
        peer.socket.close()
        self._peers.pop(peer.identity, None)


class WorkerChannel(Protocol):
    """A worker's end."""

    def receive(self, *, block: bool) -> list[ToWorker]:
        """All messages that are there; with `block`, at least one frame's."""
        ...

    def send(self, messages: Sequence[ToMain]) -> None: ...

    def close(self) -> None: ...


class SocketWorkerChannel:
    """`WorkerChannel` over the inherited end."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._frames = Frames()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[ToWorker])

    def receive(self, *, block: bool) -> list[ToWorker]:
        """Raises `ProtocolError` when main has closed its end."""
        messages: list[ToWorker] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, 0 if block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise ProtocolError("main closed the channel")
            for frame in self._frames.cut(data):
                messages += self._decoder.decode(frame)
            block = block and not messages
            if len(data) < _READ_BYTES and not block:
                return messages

    def send(self, messages: Sequence[ToMain]) -> None:
        self._socket.sendall(encode(self._encoder, messages))

    def close(self) -> None:
        self._socket.close()


def _ignore(identity: str, what: object) -> None:
    return None
