"""The control plane between main and workers: ZeroMQ ROUTER / DEALER over ipc, a frame a turn.

Main's end is driven by the event loop: the socket's descriptor is edge-triggered, so it is drained
until EAGAIN and looked at again after every send. A worker's end blocks. Each worker gets an
endpoint of its own in a private folder, which is removed as soon as the worker has connected: from
then on there is no name that could leak, be guessed or be bound a second time. The socket options
and why they are needed: docs/design.md, "Control plane".
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from omni_rt.errors import OmniError, ProtocolError
from omni_rt.wire.messages import ToMain, ToWorker

# A frame above this size is refused by the receiver (which drops the connection) and by the sender
# (which raises): bulk data belongs into an arena.
MAX_FRAME_BYTES = 32 << 20
# Frames taken in one go before other callbacks of the loop get their turn.
_FRAMES_PER_TURN = 256

OnMessages = Callable[[str, list[ToMain]], None]
OnGarbage = Callable[[str, str], None]


class Channel(Protocol):
    """Main's end. Peers are named by identity: "worker.replica.epoch"."""

    def open_endpoint(self, identity: str) -> str:
        """An address for one new worker to connect to."""
        ...

    def connected(self, identity: str) -> None:
        """The worker has said hello: its address is not needed any more."""
        ...

    def forget(self, identity: str) -> None:
        """The worker is gone."""
        ...

    def watch(self, on_messages: OnMessages, on_garbage: OnGarbage) -> None:
        """Call back from the running loop for every frame that arrives."""
        ...

    def send(self, identity: str, messages: Sequence[ToWorker]) -> bool:
        """Send one frame without blocking; False if the peer is not there."""
        ...

    def close(self) -> None: ...


class ZmqChannel:
    """`Channel` over a ROUTER socket."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # an unknown peer is an error, not silence
            (zmq.ROUTER_HANDOVER, 1),  # a new connection wins over a dead one of the same name
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),  # bounded by admission and byte credits, never by dropping
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        ):
            self._socket.setsockopt(option, value)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[ToMain])
        self._endpoints: dict[str, str] = {}
        self._folders: dict[str, Path] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_messages: OnMessages = _ignore
        self._on_garbage: OnGarbage = _ignore
        self._drain_soon = False

    def open_endpoint(self, identity: str) -> str:
        folder = Path(tempfile.mkdtemp(prefix="omni-rt-"))  # mode 0700
        address = f"ipc://{folder}/c"
        if len(str(folder / "c")) > zmq.IPC_PATH_MAX_LEN:
            folder.rmdir()
            raise OmniError(
                f"the folder for sockets, {folder.parent}, has too long a path for a unix socket",
                hint="set TMPDIR to a shorter one",
            )
        self._socket.bind(address)
        self._endpoints[identity] = address
        self._folders[identity] = folder
        return address

    def connected(self, identity: str) -> None:
        folder = self._folders.pop(identity, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def forget(self, identity: str) -> None:
        self.connected(identity)
        address = self._endpoints.pop(identity, None)
        if address is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.unbind(address)

    def watch(self, on_messages: OnMessages, on_garbage: OnGarbage) -> None:
        self._on_messages, self._on_garbage = on_messages, on_garbage
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)
        self._schedule_drain()

    def send(self, identity: str, messages: Sequence[ToWorker]) -> bool:
        frame = self._encoder.encode(messages)
        if len(frame) > MAX_FRAME_BYTES:
            if len(messages) == 1:
                raise ProtocolError(f"a message of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
            half = len(messages) // 2
            return self.send(identity, messages[:half]) and self.send(identity, messages[half:])
        try:
            self._socket.send_multipart((identity.encode(), frame), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._schedule_drain()
        return True

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        for identity in list(self._folders):
            self.connected(identity)
        self._socket.close(linger=0)
        self._context.term()

    def _schedule_drain(self) -> None:
        if self._loop is not None and not self._drain_soon:
            self._drain_soon = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_soon = False
        for _ in range(_FRAMES_PER_TURN):
            if self._loop is None:  # closed by a callback
                return
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(sender.decode("ascii", "replace"), frames)
        self._schedule_drain()

    def _take(self, identity: str, frames: list[bytes]) -> None:
        try:
            messages = self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, IndexError) as error:
            self._on_garbage(identity, str(error))
            return
        self._on_messages(identity, messages)


class WorkerChannel(Protocol):
    """A worker's end."""

    def receive(self, *, block: bool) -> list[ToWorker]:
        """All messages that are there; with `block`, at least one frame's."""
        ...

    def send(self, messages: Sequence[ToMain]) -> None: ...

    def close(self) -> None: ...


class ZmqWorkerChannel:
    """`WorkerChannel` over a DEALER socket."""

    def __init__(self, address: str, identity: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[ToWorker])

    def receive(self, *, block: bool) -> list[ToWorker]:
        messages: list[ToWorker] = []
        # Asking first costs a fifth of a `recv` that raises `Again`.
        while block or int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            messages += self._decoder.decode(self._socket.recv())
            block = False
        return messages

    def send(self, messages: Sequence[ToMain]) -> None:
        self._socket.send(self._encoder.encode(messages))

    def close(self, linger_ms: int = 200) -> None:
        self._socket.close(linger=linger_ms)  # lets the last word (`Crashed`) out
        self._context.term()


def _ignore(identity: str, what: object) -> None:
    return None
