"""How long short diffusion requests wait beside long ones: by policy, and by first come.

`python -m bench.dit_fairness [--seconds 20] [--rounds 1]`. Keys: docs/bench.md.

A tiny pipeline that reads prompts gets short requests (4 steps) and long ones (50 steps, of another
size) at random times; each kind asks for a third of the device. The short ones' p95 is compared
with what they have alone on a device that is only as fast as their share of it: that is their p95
alone at arrivals that are closer together by the share, divided by the share.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import uvloop

from bench.common import finish, p50
from omni_rt import AsyncOmni, Request
from omni_rt.config import parse_pipeline
from tests.engines_dit import tiny

PIPELINE = """
stages:
  painter:
    engine: diffusers
    model: %(folder)s
    device: cpu
    max_batch: 1
    slots: 64
    queue: 2000
    policy: %(policy)s
    sampling: {guidance_scale: 0.0, max_sequence_length: 32}
outputs: {image: painter.image}
"""
SHORT = {"num_inference_steps": 4, "height": 64, "width": 64}
LONG = {"num_inference_steps": 50, "height": 128, "width": 128}
LOAD_EACH = 0.33
SHARE = 0.5  # of the device's busy time, by the plan

Plan = list[tuple[float, bool]]
"""When each comes, in seconds, and whether it is a short one."""


def plan(seconds: float, short_s: float, long_s: float, seed: int) -> Plan:
    draw = random.Random(seed)
    made: Plan = []
    for short, work_s in ((True, short_s), (False, long_s)):
        now = draw.expovariate(LOAD_EACH / work_s)
        while now < seconds:
            made.append((now, short))
            now += draw.expovariate(LOAD_EACH / work_s)
    return sorted(made)


async def one(omni: AsyncOmni, short: bool, seed: int) -> float:
    started = time.monotonic()
    params = SHORT if short else LONG
    async with omni.submit(Request(prompt="a circle", params=params, seed=seed)) as stream:
        async for _ in stream:
            pass
    return time.monotonic() - started


async def follow(omni: AsyncOmni, todo: Plan) -> tuple[list[float], list[float]]:
    """Seconds of the short and of the long ones."""
    began = time.monotonic()
    tasks: list[tuple[bool, asyncio.Task[float]]] = []
    async with asyncio.TaskGroup() as group:
        for seed, (when, short) in enumerate(todo):
            await asyncio.sleep(max(0.0, began + when - time.monotonic()))
            tasks.append((short, group.create_task(one(omni, short, seed))))
    done = [(short, task.result()) for short, task in tasks]
    return [s for short, s in done if short], [s for short, s in done if not short]


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))] if values else float("nan")


async def main(seconds: float, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tiny.save(tiny.zimage_with_text(), Path(folder))

        def text(policy: str) -> str:
            return PIPELINE % {"folder": folder, "policy": policy}

        seen: dict[str, list[float]] = {"fair": [], "first_come": [], "alone": []}
        longs: dict[str, list[float]] = {"fair": [], "first_come": []}
        async with (
            AsyncOmni(parse_pipeline(text("fair"), "fair.yaml")) as fair,
            AsyncOmni(parse_pipeline(text("first_come"), "first.yaml")) as first,
        ):
            short_s, long_s = 0.0, 0.0
            for omni in (first, fair):  # the second time is what counts: all is warm
                for _ in range(3):
                    short_s, long_s = await one(omni, True, 0), await one(omni, False, 0)
            print(f"alone: short {short_s * 1e3:.0f} ms, long {long_s * 1e3:.0f} ms")
            for number in range(rounds):
                todo = plan(seconds, short_s, long_s, number)
                for name, omni in (("fair", fair), ("first_come", first)):
                    short, long = await follow(omni, todo)
                    seen[name] += short
                    longs[name] += long
                closer = [(when * SHARE, True) for when, short in todo if short]
                seen["alone"] += [s / SHARE for s in (await follow(fair, closer))[0]]
    for name, values in seen.items():
        print(f"{name:>10}: {len(values)} short, p50 {p50(values):.3f} s, p95 {p95(values):.3f} s")
    return {
        "short_p95_over_alone": round(p95(seen["fair"]) / p95(seen["alone"]), 3),
        "short_p95_over_alone_first_come": round(p95(seen["first_come"]) / p95(seen["alone"]), 3),
        "short_p95_s": round(p95(seen["fair"]), 3),
        "short_p95_s_first_come": round(p95(seen["first_come"]), 3),
        "long_p95_over_first_come": round(p95(longs["fair"]) / p95(longs["first_come"]), 3),
        "short": len(seen["fair"]),
        "long": len(longs["fair"]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    finish(uvloop.run(main(given.seconds, given.rounds)))
