"""Real pipelines of echo and simulated stages for tests: processes, sockets, arenas."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from omni_rt.config import parse_pipeline
from omni_rt.request import Data, Done, Output, Request, Text
from omni_rt.runtime.omni import AsyncOmni

ECHO = """
stages:
  echo: {engine: echo, arena: 8MiB, max_batch: 4, queue: 4}
outputs: {text: echo.text}
"""
CHAIN = """
stages:
  writer:  {engine: simulated, max_batch: 4, queue: 32, arena: 8MiB, simulated: {step_s: 0.005, steps: 8, ports: {text: {every: 1}, hidden: {bytes: 100000}}}}
  painter: {engine: simulated, max_batch: 4, queue: 32, arena: 8MiB, simulated: {step_s: 0.01, steps: 10, inputs: [prompt_embeds], ports: {image: {bytes: 50000}}}}
edges:
  - writer.hidden -> painter.prompt_embeds
outputs: {text: writer.text, image: painter.image}
"""
RESTART = "restart: {max_deaths: 3, backoff_s: 0.05, backoff_max_s: 0.5}"


@contextlib.asynccontextmanager
async def running(text: str, extra: str = "") -> AsyncIterator[AsyncOmni]:
    config = parse_pipeline(extra + text.replace("engine:", f"{RESTART}, engine:"), "test.yaml")
    async with AsyncOmni(config) as omni:
        yield omni


async def collect(omni: AsyncOmni, request: Request) -> list[Output]:
    async with omni.submit(request) as stream:
        return [output async for output in stream]


def text_of(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, Text))


def data_of(outputs: list[Output], name: str) -> bytes:
    return b"".join(o.data for o in outputs if isinstance(o, Data) and o.output == name)


def done_of(outputs: list[Output]) -> Done:
    done = outputs[-1]
    assert isinstance(done, Done)
    return done


def children() -> set[int]:
    """Processes whose parent is this one."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
