"""What the runtime costs: beside bare vLLM, on the way of a small chunk, and in main.

`python -m bench.overhead [--rounds 5] [--only ar|hop|router]`. Keys: docs/bench.md.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from bench import handoff, router
from bench.common import MODEL, child_path, finish, p50, p99
from bench.peers import Peers
from omni_rt import AsyncOmni, Request
from omni_rt.config import parse_pipeline
from omni_rt.wire.messages import StageSpec

REQUESTS, TOKENS, BATCH = 96, 64, 16
PROMPTS = [f"a picture of {n} red circles and {n % 5} blue squares" for n in range(REQUESTS)]
SAMPLING = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
WRITER = f"""
model: {MODEL}
stages: {{writer: {{engine: vllm, part: writer, device: cpu, max_batch: {BATCH}, queue: 96}}}}
outputs: {{text: writer.text}}
"""
CHUNK_BYTES = 256


# ---- the AR stage


def bare_vllm(control: Connection) -> None:
    """vLLM's own engine in a process of its own; on "go", seconds for all requests."""
    from omni_rt_workers.engines.vllm_ar import arguments, prompt

    spec = StageSpec(
        name="writer",
        engine="vllm",
        model=str(MODEL),
        part="writer",
        device="cpu",
        max_batch=BATCH,
        options={},
        sampling={},
        credits={},
    )
    arguments.set_environment(spec)
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    args = arguments.engine_args(spec, arguments.Hidden())
    args.worker_cls = "auto"  # its own, which gives no hidden states
    engine = LLMEngine.from_engine_args(args)
    tokenizer = engine.get_tokenizer()
    params = SamplingParams(**SAMPLING, output_kind=RequestOutputKind.DELTA)
    control.send("ready")
    number = 0
    while control.recv() == "go":
        started = time.perf_counter()
        tokens = 0
        for text in PROMPTS:
            number += 1
            ids = prompt.token_ids({"prompt": text}, tokenizer)
            engine.add_request(str(number), tokens_input(ids), params)
        while engine.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
        seconds = time.perf_counter() - started
        assert tokens == REQUESTS * TOKENS, tokens
        control.send(seconds)
    os._exit(0)


async def our_seconds(omni: AsyncOmni) -> float:
    async def one(text: str) -> None:
        async with omni.submit(Request(prompt=text, params=SAMPLING)) as stream:
            async for _ in stream:
                pass

    started = time.perf_counter()
    await asyncio.gather(*(one(text) for text in PROMPTS))
    return time.perf_counter() - started


def thread_cpu_s(pid: int) -> float:
    """CPU seconds of a process's main thread, which is the one that steps the engine."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def ar(rounds: int) -> dict[str, object]:
    """Throughput of the bundled writer in the runtime over that of vLLM alone."""
    context = mp.get_context("spawn")
    control, theirs = context.Pipe()
    process = context.Process(target=bare_vllm, args=(theirs,), daemon=True)
    process.start()
    ours, bare = [], []
    ours_cpu, bare_cpu = [], []
    async with AsyncOmni(parse_pipeline(WRITER, "writer.yaml")) as omni:
        await asyncio.to_thread(control.recv)
        worker = omni.status().stages["writer"].pid
        assert worker is not None
        assert process.pid is not None
        for number in range(rounds + 1):
            for way in ("ours", "bare") if number % 2 else ("bare", "ours"):
                pid = worker if way == "ours" else process.pid
                before = thread_cpu_s(pid)
                if way == "ours":
                    ours.append(await our_seconds(omni))
                    ours_cpu.append(thread_cpu_s(pid) - before)
                else:
                    control.send("go")
                    bare.append(await asyncio.to_thread(control.recv))
                    bare_cpu.append(thread_cpu_s(pid) - before)
    control.send("stop")
    process.join(10)
    process.kill()
    mine, theirs_s = p50(ours[1:]), p50(bare[1:])
    print(f"AR: {REQUESTS} requests of {TOKENS} tokens: {mine:.3f} s, bare {theirs_s:.3f} s")
    return {
        "ar_throughput_ratio": round(theirs_s / mine, 3),
        "ar_cpu_ratio": round(p50(bare_cpu[1:]) / p50(ours_cpu[1:]), 3),
        "ar_tokens_per_s": round(REQUESTS * TOKENS / mine),
        "ar_bare_tokens_per_s": round(REQUESTS * TOKENS / theirs_s),
    }


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
