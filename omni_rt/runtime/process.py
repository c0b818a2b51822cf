"""Worker processes: spawned by name, tied to main by a lifeline, watched through a pidfd."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

import msgspec

from omni_rt.wire.arena import Arena
from omni_rt.wire.messages import WorkerSpec

WORKER_MODULE = "omni_rt_workers"
_TAIL_LINES = 40

log = logging.getLogger(__name__)

OnExit = Callable[[str, str | None], None]
"""Called with the identity and the process's own last words."""


class Handle(Protocol):
    """A started worker process."""

    pid: int

    def attach(self, arena: Arena) -> None:
        """Hand over the descriptor that the next `Attach` message announces."""
        ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts workers. The simulation has one of its own."""

    def launch(
        self, spec: WorkerSpec, arena: Arena, channel: socket.socket, on_exit: OnExit
    ) -> Handle:
        """Start a worker that writes `arena` and inherits `channel`, its end of the channel."""
        ...


class ProcessLauncher:
    """`Launcher` for real processes on this machine."""

    def launch(
        self, spec: WorkerSpec, arena: Arena, channel: socket.socket, on_exit: OnExit
    ) -> Handle:
        return WorkerProcess(spec, arena, channel, on_exit)


class WorkerProcess:
    def __init__(
        self, spec: WorkerSpec, arena: Arena, channel: socket.socket, on_exit: OnExit
    ) -> None:
        self._identity = spec.identity
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._partial = b""
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), channel.fileno())
        with theirs:
            # -P: a folder of the user's that is called like one of our modules must not win.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER_MODULE, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
            )
        self.pid = self._popen.pid
        packet = msgspec.msgpack.encode(spec)
        self._lifeline.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        socket.send_fds(self._lifeline, [packet], [arena.fd])
        self._lifeline.setblocking(False)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._exited)
        assert self._popen.stdout is not None
        self._output = self._popen.stdout.fileno()
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read_output)

    def attach(self, arena: Arena) -> None:
        try:
            socket.send_fds(self._lifeline, [b"a"], [arena.fd])
        except OSError as error:  # it does not read its lifeline any more: it is gone or stuck
            log.warning("worker %s: cannot hand over an arena: %s", self._identity, error)
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._read_output()
        self._loop.remove_reader(self._output)
        code = self._popen.wait()
        os.close(self._pidfd)
        self._lifeline.close()
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._on_exit(self._identity, self._last_words(code))

    def _read_output(self) -> None:
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._tail.append(text)
                log.info("[%s] %s", self._identity, text)

    def _last_words(self, code: int) -> str | None:
        if code == 0:
            return None
        how = f"exit status {code}" if code > 0 else f"killed by {_signal_name(-code)}"
        return f"{how}: {self._tail[-1]}" if self._tail else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
