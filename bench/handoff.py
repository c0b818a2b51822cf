"""A tensor from one process to another: the product against the floor and against other ways.

`python -m bench.handoff [--rounds 5] [--quick]`. The product is the real thing: a running
`AsyncOmni` whose two workers stream tensors through main, which books every lease. Measured is the
time from "the producer holds the tensor" to "the consumer holds a torch tensor". All ways take
turns in every round; ratios are of medians within one run. Keys: docs/bench.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import tempfile
import warnings
from contextlib import AsyncExitStack, ExitStack

import numpy as np
import uvloop
from msgspec.structs import replace

from bench.common import child_path, finish, p50, p99
from bench.peers import PEERS, Peers
from bench.ray_pair import RayPair
from omni_rt import AsyncOmni, Data, Request
from omni_rt.config import parse_pipeline
from omni_rt.runtime.process import Handle, OnExit, ProcessLauncher
from omni_rt.wire.arena import Arena
from omni_rt.wire.messages import WorkerSpec
from omni_rt.wire.tensors import INLINE_LIMIT_BYTES

SIZES = {"256B": 256, "4KB": 4 << 10, "16KB": 16 << 10, "64KB": 64 << 10}
SIZES |= {"1MB": 1 << 20, "16MB": 16 << 20, "64MB": 64 << 20}
COUNTS = {"256B": 100, "4KB": 100, "16KB": 100, "64KB": 100, "1MB": 100, "16MB": 24, "64MB": 8}
OURS = {"arena": "copy", "inplace": "inplace"}

PIPELINE = """
stages:
  source:
    {engine: "bench.engines:make_source", arena: 512MiB, device: cpu, options: {fifo: %(fifo)s}}
  sink:
    {engine: "bench.engines:make_sink", arena: 8MiB, device: cpu, options: {fifo: %(fifo)s}}
edges:
  - {from: source.x, to: sink.x, stream: true}
outputs: {sent: source.sent, there: sink.there, got: sink.got, read: sink.read}
"""

Times = tuple[list[int], list[int]]


async def ours(
    omni: AsyncOmni, mode: str, size: int, count: int, depth: int, until: str = "got"
) -> Times:
    """Times (ns) at which each tensor was held by the producer and by the consumer.

    `until` "there": until the consumer's engine was called instead.
    """

    params = {"bytes": size, "count": count, "depth": depth, "mode": mode}
    times: dict[str, list[int]] = {}
    async for output in omni.submit(Request(prompt="go", params=params)):
        if isinstance(output, Data):
            times[output.output] = np.frombuffer(output.data, dtype=np.int64).tolist()
    return times["sent"], times[until]


class Limited(ProcessLauncher):
    """Workers with another inline limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes

    def launch(
        self, spec: WorkerSpec, arena: Arena, channel: socket.socket, on_exit: OnExit
    ) -> Handle:
        limited = replace(spec, inline_limit_bytes=self._limit_bytes)
        return super().launch(limited, arena, channel, on_exit)


async def crossover(rounds: int, fifos: tuple[str, str]) -> dict[str, object]:
    """From which size on a block in the arena is faster than bytes in the message."""
    times: dict[tuple[str, int], list[float]] = {}
    sizes = [1 << n for n in range(10, 19)]
    async with AsyncExitStack() as stack:
        omnis = {}
        for name, limit, fifo in zip(("inline", "block"), (1 << 20, 0), fifos, strict=True):
            config = parse_pipeline(PIPELINE % {"fifo": fifo}, f"{name}.yaml")
            omni = AsyncOmni(config, launcher=Limited(limit))
            omnis[name] = await stack.enter_async_context(omni)
        for number in range(rounds + 1):
            for size in sizes:
                for name in sorted(omnis, reverse=number % 2 == 0):
                    sent, got = await ours(omnis[name], "copy", size, 100, 1)
                    if number:  # the first was to warm up
                        took = [(g - s) / 1e3 for s, g in zip(sent, got, strict=True)]
                        times.setdefault((name, size), []).extend(took)
    middle = {key: p50(took) for key, took in times.items()}
    print("\nbytes, us inline, us in the arena")
    for size in sizes:
        print(f"{size:8} {middle['inline', size]:8.0f} {middle['block', size]:8.0f}")
    slower = [size for size in sizes if middle["inline", size] > middle["block", size]]
    always = [size for size in slower if all(larger in slower for larger in sizes if larger > size)]
    return {
        "inline_arena_crossover_bytes": min(always, default=2 * sizes[-1]),
        "inline_limit_bytes": INLINE_LIMIT_BYTES,
        **{
            f"inline_over_arena_{size}B": round(middle["inline", size] / middle["block", size], 3)
            for size in sizes
        },
    }


async def measure(rounds: int, fifo: str, peers: Peers, ray: RayPair | None) -> dict[str, object]:
    ways = [*PEERS, *(["ray"] if ray else []), *OURS]
    latency: dict[tuple[str, str], list[float]] = {}
    rate: dict[tuple[str, str], list[float]] = {}
    async with AsyncOmni(parse_pipeline(PIPELINE % {"fifo": fifo}, "handoff.yaml")) as omni:

        async def run(way: str, size: int, count: int, depth: int) -> Times:
            if way in OURS:
                return await ours(omni, OURS[way], size, count, depth)
            if way == "ray" and ray is not None:
                return await asyncio.to_thread(ray.run, size, count, depth)
            return await asyncio.to_thread(peers.run, way, size, count, depth)

        for way in ways:  # warm-up, not counted
            for size in SIZES.values():
                await run(way, size, 3, 1)
        for number in range(rounds):
            turn = number % len(ways)
            for name, size in SIZES.items():
                for way in ways[turn:] + ways[:turn]:
                    sent, got = await run(way, size, COUNTS[name], 1)
                    times = [(g - s) / 1e3 for s, g in zip(sent, got, strict=True)]
                    latency.setdefault((way, name), []).extend(times)
                    if way != "floor":  # which has a single slot
                        sent, got = await run(way, size, COUNTS[name], 4)
                        gbs = size * len(got) / max(1, got[-1] - sent[0])
                        rate.setdefault((way, name), []).append(gbs)
    return report(ways, latency, rate)


def report(
    ways: list[str],
    latency: dict[tuple[str, str], list[float]],
    rate: dict[tuple[str, str], list[float]],
) -> dict[str, object]:
    middle = {key: p50(times) for key, times in latency.items()}
    for title, table in (
        ("p50 us", middle),
        ("p99 us", {key: p99(times) for key, times in latency.items()}),
        ("GB/s, 4 in flight", {key: p50(values) for key, values in rate.items()}),
    ):
        print(f"\n{title:18}" + "".join(f"{name:>10}" for name in SIZES))
        for way in ways:
            row = [table.get((way, name)) for name in SIZES]
            cells = ["" if v is None else f"{v:.2f}" if v < 100 else f"{v:.0f}" for v in row]
            print(f"{way:18}" + "".join(f"{cell:>10}" for cell in cells))
    result: dict[str, object] = {}
    for name in SIZES:
        arena = middle["arena", name]
        result[f"arena_over_floor_{name}"] = round(arena / middle["floor", name], 3)
        for way in [way for way in ways if way != "floor" and way not in OURS]:
            key = f"{way.removesuffix('_queue')}_over_arena_{name}"
            result[key] = round(middle[way, name] / arena, 3)
    result["inplace_64MB_over_64KB"] = round(
        middle["inplace", "64MB"] / middle["inplace", "64KB"], 3
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="Ray too, if it is installed")
    parser.add_argument("--only", choices=("ways", "crossover"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    child_path()
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        fifos = (f"{folder}/ack", f"{folder}/ack2")
        for fifo in fifos:
            os.mkfifo(fifo)
        if args.only in (None, "ways"):
            with ExitStack() as stack:
                peers = stack.enter_context(Peers())
                ray = stack.enter_context(RayPair()) if args.peers else None
                result |= uvloop.run(measure(args.rounds, fifos[0], peers, ray))
        if args.only in (None, "crossover"):
            result |= uvloop.run(crossover(args.rounds, fifos))
    finish({"bench": "handoff", "rounds": args.rounds, **result})


if __name__ == "__main__":
    main()
