"""Whether the stages of a pipeline work at the same time, and what that is worth.

`python -m bench.pipelining [--rounds 3] [--only simulated|demo]`. Keys: docs/bench.md.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import multiprocessing as mp
import os
import sys
import time
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

import uvloop
from msgspec.structs import replace

from bench.common import MODEL, ROOT, child_path, finish, p50
from omni_rt import AsyncOmni, Image, Request
from omni_rt.config import PipelineConfig, load_pipeline, parse_pipeline

# ---- simulated stages under load

IN_FLIGHT, BATCHES, BATCH = 32, 20, 8
SIMULATED = """
preset: simulated-omni
stages:
  writer: {simulated: {step_s: 0.02, steps: 20}}
  painter: {simulated: {step_s: 0.03, steps: 10}}
  vocoder: {simulated: {step_s: 0.01, steps: 10}}
"""


async def served_per_s(omni: AsyncOmni, outputs: tuple[str, ...]) -> float:
    """Requests a second while `IN_FLIGHT` are under way, from the second batch to the last."""
    ends: list[float] = []
    left = (BATCHES + 2) * BATCH

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            async with omni.submit(Request(prompt="a song", outputs=outputs)) as stream:
                async for _ in stream:
                    pass
            ends.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(client())
    first = 2 * BATCH - 1  # the last one of a batch, as is the end
    return BATCHES * BATCH / (ends[first + BATCHES * BATCH] - ends[first])


async def simulated(rounds: int) -> dict[str, object]:
    """All three stages against the slowest, the writer, alone."""
    whole, alone = [], []
    async with AsyncOmni(parse_pipeline(SIMULATED, "simulated.yaml")) as omni:
        for _ in range(rounds):
            whole.append(await served_per_s(omni, ()))
            alone.append(await served_per_s(omni, ("text",)))
    print(f"simulated: {p50(whole):.2f} requests/s, the slowest stage alone {p50(alone):.2f}")
    return {
        "efficiency": round(p50(whole) / p50(alone), 3),
        "requests_per_s": round(p50(whole), 2),
        "slowest_alone_requests_per_s": round(p50(alone), 2),
        "slowest_ideal_requests_per_s": BATCH / (20 * 0.02),
    }


# ---- the bundled model

REQUESTS = 32
THREADS = sorted({1, os.cpu_count() or 1})  # of the script; the better one counts
COLORS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")
_THINGS = [f"{color} {shape}" for color, shape in itertools.product(COLORS, SHAPES)]
PROMPTS = [
    f"Draw a {first} left of a {second}"
    for first, second in itertools.islice(itertools.permutations(_THINGS, 2), 0, 132, 4)
][:REQUESTS]


def one_process(config: PipelineConfig) -> PipelineConfig:
    """The same stages in one worker, which steps them by turns."""
    stages = {name: replace(stage, worker="both") for name, stage in config.stages.items()}
    return replace(config, stages=stages)


async def job_seconds(omni: AsyncOmni, outputs: tuple[str, ...] = ()) -> tuple[float, int]:
    """Seconds from the first submission to the last end of the job; pictures in it."""

    async def one(seed: int, prompt: str) -> int:
        request = Request(prompt=prompt, seed=seed, outputs=outputs)
        async with omni.submit(request) as stream:
            return sum([isinstance(output, Image) async for output in stream])

    started = time.perf_counter()
    pictures = await asyncio.gather(*(one(*numbered) for numbered in enumerate(PROMPTS)))
    return time.perf_counter() - started, sum(pictures)


def script(control: Connection) -> None:
    """The script a user would write: transformers, then diffusers, one request after the other.

    Torch's threads are the user's to choose: each message says how many, 0 is the end.
    """
    sys.path.insert(0, str(ROOT / "demo"))
    import torch

    import plain

    model = plain.load(MODEL)
    control.send("ready")
    while threads := control.recv():
        torch.set_num_threads(threads)
        started, pictures = time.perf_counter(), 0
        for seed, prompt in enumerate(PROMPTS):
            _, _, hidden = model.reply(prompt)
            if len(hidden):
                model.paint(hidden, seed).save(io.BytesIO(), "PNG")
                pictures += 1
        control.send((time.perf_counter() - started, pictures))
    os._exit(0)


async def demo(rounds: int) -> dict[str, object]:
    """The job in two processes, in one, its writer's part alone, and by the script."""
    context = mp.get_context("spawn")
    control, theirs = context.Pipe()
    process = context.Process(target=script, args=(theirs,), daemon=True)
    process.start()
    seconds: dict[str, list[float]] = {}
    counts: set[int] = set()
    async with AsyncExitStack() as stack:
        config = load_pipeline(MODEL.with_suffix(".yaml"))
        two = await stack.enter_async_context(AsyncOmni(config))
        one = await stack.enter_async_context(AsyncOmni(one_process(config)))
        await asyncio.to_thread(control.recv)
        for number in range(rounds + 1):
            times = {}
            for threads in THREADS:
                control.send(threads)
                times[f"script_{threads}"] = await asyncio.to_thread(control.recv)
            times["two"] = await job_seconds(two)
            times["one"] = await job_seconds(one)
            times["writer"] = await job_seconds(one, ("text",))
            counts |= {pictures for way, (_, pictures) in times.items() if way != "writer"}
            if number:  # the first was to warm up
                for way, (took, _) in times.items():
                    seconds.setdefault(way, []).append(took)
    control.send(0)
    process.join(10)
    process.kill()
    middle = {way: p50(took) for way, took in seconds.items()}
    painter = middle["one"] - middle["writer"]
    by_script = min(middle[f"script_{threads}"] for threads in THREADS)
    slowest = max(middle["writer"], painter)
    print("demo, seconds for the job:", {way: round(took, 2) for way, took in middle.items()})
    return {
        "demo_requests": REQUESTS,
        "demo_pictures": sorted(counts),
        "demo_speedup": round(middle["one"] / middle["two"], 3),
        "demo_speedup_limit": round(middle["one"] / slowest, 3),
        "jct_script_over_ours": round(by_script / middle["two"], 3),
        "jct_script_over_ours_limit": round(by_script / slowest, 3),
        "jct_s": round(middle["two"], 3),
        "jct_one_process_s": round(middle["one"], 3),
        "jct_writer_s": round(middle["writer"], 3),
        **{f"jct_script_{n}_threads_s": round(middle[f"script_{n}"], 3) for n in THREADS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parts = {"simulated": simulated, "demo": demo}
    parser.add_argument("--only", choices=parts)
    args = parser.parse_args()
    child_path()
    result: dict[str, object] = {}
    for name, part in parts.items():
        if args.only in (None, name):
            result |= uvloop.run(part(args.rounds))
    finish({"bench": "pipelining", "rounds": args.rounds, **result})


if __name__ == "__main__":
    main()
