"""Engines of the benches' own: a source and a sink that note when a tensor left and arrived."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from bench.common import PAUSE_S
from omni_rt.wire.messages import ParamSpec, Ports, PortSpec, StageSpec
from omni_rt_workers.engine import Engine, Outbox, Say, Task

now = time.perf_counter_ns  # CLOCK_MONOTONIC: comparable between processes


class Source:
    """Sends `count` tensors of `bytes` bytes on `x`, `depth` of them unacknowledged at most.

    The acknowledgement is one byte of the sink's through a FIFO. `mode`: "copy" puts a tensor that
    lies elsewhere (one copy), "inplace" publishes one that was written in place (none), "bytes"
    puts bytes. With a depth of 1 it pauses between two tensors, in which the leases come back, as
    in a stage's step. Gives the times at which it held each tensor on `sent`, int64 ns.
    """

    def __init__(self, spec: StageSpec, out: Outbox) -> None:
        self._out = out
        self._fifo = str(spec.options["options"]["fifo"])
        self._ack = -1
        self._task: Task | None = None
        self._sent: list[int] = []
        self._paused = False
        self._tensors: dict[int, torch.Tensor] = {}

    def load(self, say: Say) -> Ports:
        torch.set_num_threads(1)
        self._ack = os.open(self._fifo, os.O_RDWR)
        params = tuple(ParamSpec(name, "int", 0) for name in ("bytes", "count", "depth"))
        return Ports(
            (),
            (PortSpec("x", "tensor"), PortSpec("sent", "tensor")),
            (*params, ParamSpec("mode", "str")),
            slots=1,
        )

    def add(self, task: Task) -> None:
        self._task, self._sent = task, []
        self._unacknowledged = 0
        size = task.params["bytes"]
        if size not in self._tensors:
            self._tensors[size] = torch.arange(size // 4, dtype=torch.float32)

    def feed(self, task: Task, port: str) -> None:
        return None

    def abort(self, task: Task) -> None:
        self._task = None

    def step(self) -> None:
        task = self._task
        assert task is not None
        all_sent = len(self._sent) == task.params["count"]
        while self._unacknowledged >= (1 if all_sent else task.params["depth"]):
            self._unacknowledged -= len(os.read(self._ack, 64))
        if all_sent:  # every byte of the FIFO is read: none is left for the next request
            self._finish(task)
        elif task.params["depth"] == 1 and self._sent and not self._paused:
            time.sleep(PAUSE_S)
            self._paused = True  # the next turn takes what came meanwhile, then sends
        else:
            self._paused = False
            self._send(task)

    def _send(self, task: Task) -> None:
        source = self._tensors[task.params["bytes"]]
        last = len(self._sent) + 1 == task.params["count"]
        if task.params["mode"] == "inplace":
            self._out.reserve(task, "x", tuple(source.shape), "float32")
            self._sent.append(now())
            self._out.publish(task, "x", last=last)
        elif task.params["mode"] == "bytes":
            data = bytes(task.params["bytes"])
            self._sent.append(now())
            self._out.put_bytes(task, "x", data, last=last)
        else:
            self._sent.append(now())
            self._out.put(task, "x", source, last=last)
        self._unacknowledged += 1

    def _finish(self, task: Task) -> None:
        self._task = None
        self._out.put(task, "sent", torch.tensor(self._sent), last=True)
        self._out.finish(task)

    @property
    def idle(self) -> bool:
        return self._task is None or self._task.held

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        os.close(self._ack)


class Sink:
    """Takes what streams in on `x`; gives the times at which each chunk was there, was a tensor,
    and had been read."""

    def __init__(self, spec: StageSpec, out: Outbox) -> None:
        self._out = out
        self._fifo = str(spec.options["options"]["fifo"])
        self._ack = -1
        self._there: list[int] = []
        self._got: list[int] = []
        self._read: list[int] = []
        self._done: Task | None = None

    def load(self, say: Say) -> Ports:
        torch.set_num_threads(1)
        self._ack = os.open(self._fifo, os.O_RDWR)
        outputs = tuple(PortSpec(name, "tensor") for name in ("there", "got", "read"))
        return Ports((PortSpec("x", "tensor"),), outputs, (), slots=1)

    def add(self, task: Task) -> None:
        self._there, self._got, self._read = [], [], []

    def feed(self, task: Task, port: str) -> None:
        there = now()
        tensors: list[Any] = task.inputs.tensors(port)
        if tensors:
            self._there.append(there)
            self._got.append(now())
            tensors[-1].sum()
            self._read.append(now())
            task.inputs.release(port, len(self._got))
            os.write(self._ack, b"a")
        if task.inputs.ended(port):
            self._done = task

    def abort(self, task: Task) -> None:
        return None

    def step(self) -> None:
        task, self._done = self._done, None
        assert task is not None
        self._out.put(task, "there", torch.tensor(self._there), last=True)
        self._out.put(task, "got", torch.tensor(self._got), last=True)
        self._out.put(task, "read", torch.tensor(self._read), last=True)
        self._out.finish(task)

    @property
    def idle(self) -> bool:
        return self._done is None

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        os.close(self._ack)


def make_source(spec: StageSpec, out: Outbox) -> Engine:
    return Source(spec, out)


def make_sink(spec: StageSpec, out: Outbox) -> Engine:
    return Sink(spec, out)
