"""What the runtime costs: beside bare vLLM, on the way of a small chunk, and in main.

`python -m bench.overhead [--rounds 5] [--only ar|hop|router]`. Keys: docs/bench.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile

import uvloop

from bench import handoff, router
from bench.ar import ar
from bench.common import child_path, finish, p50, p99
from bench.peers import Peers
from omni_rt import AsyncOmni
from omni_rt.config import parse_pipeline

CHUNK_BYTES = 256


# ---- a hop


async def hop(rounds: int) -> dict[str, object]:
    """From the producer's engine to the consumer's engine, through main, with a small chunk."""
    raw: list[float] = []
    ours: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Peers() as peers:
        fifo = f"{folder}/ack"
        os.mkfifo(fifo)
        config = parse_pipeline(handoff.PIPELINE % {"fifo": fifo}, "hop.yaml")
        async with AsyncOmni(config) as omni:
            for number in range(rounds + 1):
                theirs = await asyncio.to_thread(peers.run, "hops", CHUNK_BYTES, 200, 1)
                mine = await handoff.ours(omni, "bytes", CHUNK_BYTES, 200, 1, "there")
                if number:  # the first was to warm up
                    raw += [(g - s) / 1e3 for s, g in zip(*theirs, strict=True)]
                    ours += [(g - s) / 1e3 for s, g in zip(*mine, strict=True)]
    print(f"hop: p50 {p50(ours):.0f} us, p99 {p99(ours):.0f} us; two raw hops {p50(raw):.0f} us")
    return {
        "hop_over_two_raw_hops": round(p50(ours) / p50(raw), 3),
        "hop_us_p50": round(p50(ours), 1),
        "hop_us_p99": round(p99(ours), 1),
        "two_raw_hops_us_p50": round(p50(raw), 1),
        "two_raw_hops_us_p99": round(p99(raw), 1),
    }


# ---- main alone


async def route(rounds: int) -> dict[str, object]:
    result: dict[str, object] = {}
    for width, steps in ((1, 10_000), (16, 1500), (256, 200)):
        for blocks in (False, True):
            runs = [await router.chunks_per_s(width, steps, blocks=blocks) for _ in range(rounds)]
            rate, cpu = p50([run[0] for run in runs]), p50([run[1] for run in runs])
            name = f"{'leased_' * blocks}chunks_per_s_{width}"
            print(f"{name}: {rate:.0f}, {cpu:.1f} us of CPU a chunk")
            result[name] = round(rate)
            result[name.replace("chunks_per_s", "chunk_cpu_us")] = round(cpu, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parts = {"router": route, "hop": hop, "ar": ar}
    parser.add_argument("--only", choices=parts)
    args = parser.parse_args()
    child_path()
    result: dict[str, object] = {}
    for name, part in parts.items():
        if args.only in (None, name):
            result |= uvloop.run(part(args.rounds))
    finish({"bench": "overhead", "rounds": args.rounds, **result})


if __name__ == "__main__":
    main()
