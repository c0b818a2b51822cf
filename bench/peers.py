"""The other ways to hand a tensor to another process, each the way its users would do it.

A pair of processes per peer: `produce` sends `count` tensors, `depth` unacknowledged at most, and
`consume` notes when it held each. All are direct, without a main process in between, except the
floor: a warm copy and the same two raw ZeroMQ hops through a process that decodes nothing. "hops"
are these two alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing as mp
import os
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as tmp
import uvloop
import zmq

from bench.common import PAUSE_S

now = time.perf_counter_ns
PEERS = ("floor", "pickle_queue", "torch_fd", "torch_fs", "zmq_multipart")
_FLOOR_BYTES = 64 << 20


class Peers:
    """Both processes of all peers, and the floor's main. A context manager."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        folder = self._folder.name
        os.mkfifo(f"{folder}/ack")
        self._warm = os.memfd_create("bench-floor")
        os.ftruncate(self._warm, _FLOOR_BYTES)
        os.symlink(f"/proc/{os.getpid()}/fd/{self._warm}", f"{folder}/warm")
        queue, torch_queue = context.Queue(), tmp.get_context("spawn").Queue()
        self._to_source, source = context.Pipe()
        self._to_sink, sink = context.Pipe()
        self._processes = [
            context.Process(target=_router, args=(folder,), daemon=True),
            context.Process(target=_produce, args=(folder, source, queue, torch_queue)),
            context.Process(target=_consume, args=(folder, sink, queue, torch_queue)),
        ]
        for process in self._processes:
            process.start()
        for end in (self._to_source, self._to_sink):
            end.recv()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._to_source, self._to_sink):
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self._processes[1:]:
            process.join(10)
        for process in self._processes:
            process.kill()
            process.join()
        os.close(self._warm)
        self._folder.cleanup()

    def run(self, peer: str, size: int, count: int, depth: int) -> tuple[list[int], list[int]]:
        """Times (ns) at which each tensor was held: by the producer, by the consumer."""
        job = (peer, size, count, depth)
        self._to_sink.send(job)
        self._to_source.send(job)
        return self._to_source.recv(), self._to_sink.recv()


def _warm(folder: str) -> torch.Tensor:
    """Shared memory of which this process has touched every page."""
    with open(f"{folder}/warm", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), _FLOOR_BYTES)
    return torch.frombuffer(mapped, dtype=torch.float32).zero_()


def _router(folder: str) -> None:
    async def main() -> None:
        socket = zmq.Context().socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{folder}/main")

        def forward() -> None:
            with contextlib.suppress(zmq.Again):
                while True:
                    name, frame = socket.recv_multipart(zmq.NOBLOCK)
                    socket.send_multipart((name if frame == b"hello" else b"sink", frame))

        asyncio.get_running_loop().add_reader(int(socket.getsockopt(zmq.FD)), forward)
        forward()
        await asyncio.Event().wait()

    uvloop.run(main())


def _dealer(folder: str, name: bytes) -> Any:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(f"ipc://{folder}/main")
    socket.send(b"hello")
    socket.recv()  # from here on the router knows it
    return socket


def _produce(folder: str, control: Connection, queue: Any, torch_queue: Any) -> None:
    torch.set_num_threads(1)
    hop = _dealer(folder, b"source")
    pair = zmq.Context().socket(zmq.PAIR)
    pair.setsockopt(zmq.SNDHWM, 0)
    pair.bind(f"ipc://{folder}/pair")
    ack = os.open(f"{folder}/ack", os.O_RDWR)
    warm = _warm(folder)
    control.send("ready")
    while (job := control.recv()) is not None:
        peer, size, count, depth = job
        source = torch.arange(size // 4, dtype=torch.float32)
        if peer.startswith("torch_"):
            way = "file_descriptor" if peer == "torch_fd" else "file_system"
            tmp.set_sharing_strategy(way)
        sent: list[int] = []
        out = 0
        for _ in range(count):
            while out >= depth:
                out -= len(os.read(ack, 64))
            if depth == 1 and sent:
                time.sleep(PAUSE_S)
            tensor = source.clone() if peer.startswith("torch_") else source
            sent.append(now())
            match peer:
                case "hops":
                    hop.send(b"12345678")
                case "floor":
                    warm[: size // 4].copy_(source)
                    hop.send(b"12345678")
                case "pickle_queue":
                    queue.put(source.numpy())
                case "torch_fd" | "torch_fs":
                    torch_queue.put(tensor)
                case "zmq_multipart":
                    pair.send_multipart([b"head", source.numpy().data], copy=False)
            out += 1
        while out:
            out -= len(os.read(ack, 64))
        control.send(sent)
    os._exit(0)


def _consume(folder: str, control: Connection, queue: Any, torch_queue: Any) -> None:
    torch.set_num_threads(1)
    hop = _dealer(folder, b"sink")
    pair = zmq.Context().socket(zmq.PAIR)
    pair.setsockopt(zmq.RCVHWM, 0)
    pair.connect(f"ipc://{folder}/pair")
    ack = os.open(f"{folder}/ack", os.O_RDWR)
    warm = _warm(folder)
    control.send("ready")
    while (job := control.recv()) is not None:
        peer, size, count, _ = job
        got: list[int] = []
        for _ in range(count):
            match peer:
                case "hops":
                    hop.recv()
                    tensor = warm[:1]
                case "floor":
                    hop.recv()
                    tensor = warm[: size // 4]
                case "pickle_queue":
                    tensor = torch.from_numpy(queue.get())
                case "torch_fd" | "torch_fs":
                    tensor = torch_queue.get()
                case _:
                    _, frame = pair.recv_multipart(copy=False)
                    array = np.frombuffer(frame.buffer, dtype=np.float32)
                    tensor = torch.from_numpy(array.copy() if size <= 1 << 16 else array)
            got.append(now())
            tensor.sum()
            del tensor
            os.write(ack, b"a")
        control.send(got)
    os._exit(0)
