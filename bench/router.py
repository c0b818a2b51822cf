"""How many chunks main can take, book and forward: two processes that speak the wire protocol and
nothing else, around the real `AsyncOmni` with its `Core` and `SocketChannel`.

`python -m bench.router ADDRESS IDENTITY ARENA` is such a process, started by `PeerLauncher`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from bench.common import ROOT
from omni_rt import AsyncOmni, Request
from omni_rt.config import parse_pipeline
from omni_rt.runtime.process import OnExit
from omni_rt.wire.arena import Arena
from omni_rt.wire.channel import SocketWorkerChannel
from omni_rt.wire.messages import (
    PROTOCOL_VERSION,
    Chunk,
    Feed,
    Finished,
    Hello,
    ParamSpec,
    Ping,
    Pong,
    Ports,
    PortSpec,
    Ready,
    Released,
    Step,
    StepItem,
    Stop,
    Submit,
    WorkerSpec,
)
from omni_rt.wire.tensors import Block, Inline

SLOTS = 256
PIPELINE = """
stages:
  feeder: {engine: echo, arena: 1MiB}
  sink: {engine: echo, arena: 1MiB}
edges: [{from: feeder.out, to: sink.in, stream: true}]
outputs: {text: sink.text}
"""
_INLINE = Inline("uint8", (64,), bytes(64))


async def chunks_per_s(width: int, steps: int, *, blocks: bool = False) -> tuple[float, float]:
    """With `width` requests in each step: (chunks a second, microseconds of main's CPU a chunk).

    The feeder sends all it has at once, so that main is never without work. `blocks`: the chunks
    are blocks in an arena, with a lease that is booked, given back and freed, instead of inline.
    """
    async with AsyncOmni(parse_pipeline(PIPELINE, "router.yaml"), launcher=PeerLauncher()) as omni:
        params = {"width": width, "steps": steps, "blocks": int(blocks)}

        async def one() -> None:
            async with omni.submit(Request(prompt="go", params=params)) as stream:
                async for _ in stream:
                    pass

        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(one())
            await asyncio.sleep(0)  # all have been submitted
            started, cpu = time.perf_counter(), time.process_time()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return width * steps / seconds, cpu / (width * steps) * 1e6


class PeerLauncher:
    """`Launcher` of `python -m bench.router` processes."""

    def launch(
        self, spec: WorkerSpec, arena: Arena, channel: socket.socket, on_exit: OnExit
    ) -> PeerHandle:
        return PeerHandle(spec, channel, on_exit)


class PeerHandle:
    def __init__(self, spec: WorkerSpec, channel: socket.socket, on_exit: OnExit) -> None:
        fd = channel.fileno()
        command = [sys.executable, "-m", "bench.router", str(fd), spec.identity]
        self._process = subprocess.Popen([*command, str(spec.arena)], cwd=ROOT, pass_fds=(fd,))
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._exit = (spec.identity, on_exit)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def attach(self, arena: Arena) -> None:
        """The sink does not look at what it is sent."""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        identity, on_exit = self._exit
        on_exit(identity, f"exit status {code}" if code else None)


def feed(channel: SocketWorkerChannel, stage: str, submits: list[Submit], arena: int) -> None:
    """All steps of all requests, as fast as they can be encoded."""
    params = submits[0].params
    block = 0
    for number in range(params["steps"]):
        last = number + 1 == params["steps"]
        items: list[StepItem] = []
        for submit in submits:
            block += 1
            data = Block(arena, 64 * block, block, "uint8", (64,)) if params["blocks"] else _INLINE
            items.append(Chunk(submit.request, submit.attempt, "out", number, data, last))
        channel.send([Step(stage, items, 0.0, len(submits))])
    finished = [Finished(s.request, s.attempt, "stop", {}) for s in submits]
    channel.send([Step(stage, list(finished), 0.0, len(submits))])


def sink(channel: SocketWorkerChannel, stage: str, feeds: list[Feed]) -> None:
    """Give the leases back; a request whose input has ended is finished."""
    blocks = [
        (feed.data.arena, feed.data.offset, feed.data.generation)
        for feed in feeds
        if isinstance(feed.data, Block)
    ]
    if blocks:
        channel.send([Released(blocks)])
    ended: list[StepItem] = [
        Finished(feed.request, feed.attempt, "stop", {}) for feed in feeds if feed.last
    ]
    if ended:
        channel.send([Step(stage, ended, 0.0, len(ended))])


def main(fd: int, identity: str, arena: int) -> None:
    channel = SocketWorkerChannel(fd)
    stage = identity.partition(".")[0]
    inputs = (PortSpec("in", "tensor"),) if stage == "sink" else ()
    outputs = (PortSpec("out", "tensor"), PortSpec("text", "text"))
    params = tuple(ParamSpec(name, "int", 0) for name in ("width", "steps", "blocks"))
    ports = Ports(inputs, outputs, () if inputs else params, SLOTS)
    channel.send([Hello(PROTOCOL_VERSION, os.getpid()), Ready(stage, ports, {})])
    submits: list[Submit] = []
    while True:
        messages = channel.receive(block=True)
        if any(isinstance(message, Stop) for message in messages):
            break
        if pongs := [Pong(m.number, {}) for m in messages if isinstance(m, Ping)]:
            channel.send(pongs)
        if inputs:
            sink(channel, stage, [m for m in messages if isinstance(m, Feed)])
            continue
        submits += [m for m in messages if isinstance(m, Submit)]
        if submits and len(submits) == submits[0].params["width"]:
            feed(channel, stage, submits, arena)
            submits.clear()
    channel.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
