"""The socket that ties a worker to main: arenas come over it, and its end is the worker's end.

One SOCK_SEQPACKET pair per worker, inherited at spawn. Main sends `WorkerSpec` with the worker's
arena, later one descriptor before each `Attach`. When main is gone, by whatever road, the socket
is at its end: a thread that does nothing but wait for that ends the process, also in the middle of
a long step. Where it is safe, the kernel's parent-death signal does the same without us.
"""

from __future__ import annotations

import array
import ctypes
import os
import select
import signal
import socket
import threading

import msgspec

from omni_rt.errors import ProtocolError
from omni_rt.wire.arena import Arena
from omni_rt.wire.messages import PROTOCOL_VERSION, Attach, WorkerSpec

_PR_SET_PDEATHSIG = 1
_MAX_PACKET_BYTES = 1 << 18


class Lifeline:
    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)

    def receive_spec(self) -> tuple[WorkerSpec, Arena]:
        """Main's first packet: what this worker is, and its arena to write."""
        packet, fd = self._receive()
        spec = msgspec.msgpack.decode(packet, type=WorkerSpec)
        if spec.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"main speaks protocol {spec.version}, this worker {PROTOCOL_VERSION}",
                hint="main and worker come from two installations of omni-rt; keep one",
            )
        arena = Arena.attach(spec.arena, fd, spec.arena_bytes, writable=True)
        return spec, arena

    def receive_arena(self, message: Attach) -> Arena:
        """The arena that `message` announces. Main sent it first, so this does not wait."""
        _, fd = self._receive()
        return Arena.attach(message.arena, fd, message.size_bytes, writable=False)

    def _receive(self) -> tuple[bytes, int]:
        space = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
        packet, ancillary, _, _ = self._socket.recvmsg(_MAX_PACKET_BYTES, space)
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not packet or not fds:
            raise ProtocolError("main closed the lifeline")
        os.set_inheritable(fds[0], False)
        return packet, fds[0]

    def die_with_main(self, spec: WorkerSpec) -> None:
        """From now on this process ends when main does."""
        if spec.die_with_thread:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spec.main_pid:  # main was gone before the signal was set
            os._exit(1)
        threading.Thread(target=self._wait_for_end, name="lifeline", daemon=True).start()

    def _wait_for_end(self) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLRDHUP)
        poll.poll()
        os._exit(1)
