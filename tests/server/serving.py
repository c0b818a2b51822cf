"""A server of simulated stages in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import uvicorn

from omni_rt.config import parse_pipeline
from omni_rt.runtime.omni import AsyncOmni
from omni_rt.server.app import create_app

PIPELINE = """
name: world
stages:
  writer:
    engine: simulated
    arena: 4MiB
    queue: 4
    simulated:
      {step_s: 0.002, steps: 8, facts: [%(fact)s], ports: {text: {every: 1}, hidden: {bytes: 9000}}}
  painter:
    engine: simulated
    arena: 4MiB
    queue: 4
    simulated: {step_s: 0.002, steps: 5, inputs: [prompt_embeds], ports: {image: {kind: image}}}
edges:
  - {from: writer.hidden, to: painter.prompt_embeds, when: image}
outputs: {text: writer.text, image: painter.image}
"""


@dataclass
class Site:
    url: str
    omni: AsyncOmni
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def site(fact: str = "image", text: str = PIPELINE) -> AsyncIterator[Site]:
    omni = AsyncOmni(parse_pipeline(text % {"fact": fact} if "%(" in text else text, "world.yaml"))
    async with omni, served(omni) as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield Site(url, omni, client)


@contextlib.asynccontextmanager
async def served(omni: AsyncOmni) -> AsyncIterator[str]:
    # Named as TCP: else asyncio leaves TCP_NODELAY off, and each reply waits 40 ms for an ACK.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(omni), log_config=None, lifespan="off", date_header=False)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve([sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
        sock.close()


async def until(condition: object, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)
