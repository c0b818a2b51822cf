"""The AR stage: requests through the runtime beside the same requests to vLLM itself.

Two opponents, each in processes of its own: vLLM's `LLMEngine` stepped in a loop, which does
nothing but generate, and `AsyncLLM`, vLLM's own server engine. Same engine arguments, same
requests, outputs read as they come. Keys: docs/bench.md, "overhead".
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.common import MODEL, p50
from omni_rt import AsyncOmni, Request
from omni_rt.config import parse_pipeline
from omni_rt.wire.messages import StageSpec

TOKENS, BATCH = 64, 16
SAMPLING = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
PIPELINE = """
stages:
  writer:
    {{engine: vllm, model: {model}, device: cpu, max_batch: {batch}, queue: 96, vllm: {vllm}}}
outputs: {{text: writer.text, hidden: writer.hidden}}
"""


@dataclass(frozen=True)
class Load:
    """A model, and how many requests go to it with how many at once."""

    name: str
    model: str
    count: dict[int, int]  # requests, by how many at once

    def prompts(self, width: int) -> list[str]:
        return [
            f"a picture of {n} red circles and {n % 5} squares" for n in range(self.count[width])
        ]


def bundled() -> Load:
    """0.7 million parameters, steps of 1 to 3 ms: the hardest case for the share of all else."""
    return Load("", str(MODEL / "writer"), {1: 6, BATCH: 96})


@contextlib.contextmanager
def larger() -> Iterator[Load]:
    """A Qwen3 of 40 million random parameters, steps of 5 to 15 ms, with the bundled tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(MODEL / "writer").save_pretrained(folder)
        yield Load("larger_", folder, {1: 2, BATCH: 32})


# ---- vLLM itself


def _engine_args(model: str, **more: Any) -> Any:
    """The engine's own arguments for a stage, with vLLM's own worker instead of ours."""
    from omni_rt_workers.engines.vllm_ar import arguments

    spec = StageSpec(
        name="writer",
        engine="vllm",
        model=model,
        part=None,
        device="cpu",
        max_batch=BATCH,
        options={},
        sampling={},
        credits={},
    )
    arguments.set_environment(spec)
    args = arguments.engine_args(spec, arguments.Hidden())
    args.worker_cls = "auto"
    for name, value in more.items():
        setattr(args, name, value)
    return args


def _ids(prompts: list[str], tokenizer: Any) -> list[list[int]]:
    from omni_rt_workers.engines.vllm_ar import prompt

    return [
        prompt.prompt_of({"prompt": text}, tokenizer, prompt.from_template).ids for text in prompts
    ]


def bare(control: Connection, load: Load, steps_file: str) -> None:
    """`LLMEngine`: on (width), the seconds for all requests of that width."""
    args = _engine_args(load.model)
    if steps_file:
        args.worker_cls = "bench.gaps.BareWorker"
        args.additional_config = {"steps_file": steps_file}
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(args)
    params = SamplingParams(**SAMPLING, output_kind=RequestOutputKind.DELTA)
    control.send("ready")
    number = 0
    while width := control.recv():
        prompts = load.prompts(width)
        started = time.perf_counter()
        tokens = 0
        for group in [prompts] if width > 1 else [[one] for one in prompts]:
            for ids in _ids(group, engine.get_tokenizer()):
                number += 1
                engine.add_request(str(number), tokens_input(ids), params)
            while engine.has_unfinished_requests():
                tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
        control.send(time.perf_counter() - started)
        assert tokens == len(prompts) * TOKENS, tokens
    os._exit(0)


def serving(control: Connection, load: Load, steps_file: str) -> None:
    """The same with `AsyncLLM`, whose engine has a process of its own."""
    args = _engine_args(load.model)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    asyncio.run(_serving(control, load, args))
    os._exit(0)


async def _serving(control: Connection, load: Load, args: Any) -> None:
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_vllm_config(args.create_engine_config(), disable_log_stats=True)
    tokenizer = engine.get_tokenizer()
    params = SamplingParams(**SAMPLING, output_kind=RequestOutputKind.DELTA)
    number = 0

    async def one(text: str) -> None:
        nonlocal number
        number += 1
        (ids,) = _ids([text], tokenizer)
        tokens = 0
        async for output in engine.generate(tokens_input(ids), params, str(number)):
            tokens += len(output.outputs[0].token_ids)
        assert tokens == TOKENS, tokens

    control.send("ready")
    while width := await asyncio.to_thread(control.recv):
        control.send(await _seconds(one, load.prompts(width), width))
    engine.shutdown()


# ---- the same through the runtime


async def _seconds(one: Callable[[str], Awaitable[None]], prompts: list[str], width: int) -> float:
    started = time.perf_counter()
    if width > 1:
        await asyncio.gather(*(one(text) for text in prompts))
    else:
        for text in prompts:
            await one(text)
    return time.perf_counter() - started


async def ours(omni: AsyncOmni, outputs: tuple[str, ...], load: Load, width: int) -> float:
    async def one(text: str) -> None:
        request = Request(prompt=text, params=SAMPLING, outputs=outputs)
        async with omni.submit(request) as stream:
            async for _ in stream:
                pass

    return await _seconds(one, load.prompts(width), width)


# ---- side by side


class Opponent:
    """A process that runs vLLM itself."""

    def __init__(self, run: Callable[..., None], load: Load, steps_file: str = "") -> None:
        context = mp.get_context("spawn")
        self._control, theirs = context.Pipe()
        # Not a daemon: AsyncLLM has a child of its own.
        self._process = context.Process(target=run, args=(theirs, load, steps_file))
        self._process.start()

    async def ready(self) -> None:
        await asyncio.to_thread(self._control.recv)

    async def seconds(self, width: int) -> float:
        self._control.send(width)
        taken: float = await asyncio.to_thread(self._control.recv)
        return taken

    def close(self) -> None:
        self._control.send(0)
        self._process.join(10)
        self._process.kill()


@dataclass
class Times:
    """Seconds of each contestant's runs; the first of each was to warm up."""

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, who: str, width: int, seconds: float) -> None:
        self.seconds.setdefault((who, width), []).append(seconds)

    def ratio(self, over: str, who: str, width: int) -> float:
        """Throughput of `who` over that of `over`."""
        theirs, mine = self.seconds[over, width][1:], self.seconds[who, width][1:]
        return round(p50(theirs) / p50(mine), 3)


async def compare(load: Load, rounds: int) -> dict[str, object]:
    opponents = {"bare": Opponent(bare, load), "async": Opponent(serving, load)}
    times = Times()
    config = PIPELINE.format(model=load.model, batch=BATCH, vllm="{}")
    async with AsyncOmni(parse_pipeline(config, "writer.yaml")) as omni:
        for opponent in opponents.values():
            await opponent.ready()
        ways: dict[str, Callable[[int], Awaitable[float]]] = {
            "off": lambda width: ours(omni, ("text",), load, width),
            "on": lambda width: ours(omni, ("text", "hidden"), load, width),
            **{name: opponent.seconds for name, opponent in opponents.items()},
        }
        for number in range(rounds + 1):
            for width in (1, BATCH):
                for name in sorted(ways, reverse=number % 2 == 0):
                    times.add(name, width, await ways[name](width))
    for opponent in opponents.values():
        opponent.close()
    result = {
        f"{load.name}ar_over_{over}_{kind}_{width}": times.ratio(over, kind, width)
        for over in ("async", "bare")
        for kind in ("off", "on")
        for width in (1, BATCH)
    }
    tokens = load.count[BATCH] * TOKENS
    for who in ("off", "bare", "async"):
        rate = tokens / p50(times.seconds[who, BATCH][1:])
        result[f"{load.name}ar_tokens_per_s_{who}"] = round(rate)
    print(f"AR {load.name or 'bundled'}: {result}", flush=True)
    return dict(result)


async def gap(load: Load, rounds: int) -> dict[str, object]:
    """Time between two steps of a full batch, in the runtime over in a bare loop."""
    from bench.gaps import gaps_s

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        files = {who: Path(folder, who) for who in ("bare", "ours")}
        opponent = Opponent(bare, load, str(files["bare"]))
        own = {"steps_file": str(files["ours"])}
        vllm = f"{{worker_cls: bench.gaps.OmniWorker, additional_config: {own}}}"
        config = PIPELINE.format(model=load.model, batch=BATCH, vllm=vllm)
        gaps: dict[str, list[float]] = {"bare": [], "ours": []}
        async with AsyncOmni(parse_pipeline(config, "writer.yaml")) as omni:
            await opponent.ready()
            for number in range(rounds + 1):
                await ours(omni, ("text",), load, BATCH)
                await opponent.seconds(BATCH)
                for who, file in files.items():
                    found = gaps_s(file)
                    gaps[who] += found if number else []
        opponent.close()
    return {
        f"{load.name}step_gap_ratio": round(p50(gaps["ours"]) / p50(gaps["bare"]), 3),
        f"{load.name}step_gap_us": round(p50(gaps["ours"]) * 1e6),
        f"{load.name}step_gap_bare_us": round(p50(gaps["bare"]) * 1e6),
    }


async def ar(rounds: int) -> dict[str, object]:
    result: dict[str, object] = {}
    with larger() as more:
        for load in (bundled(), more):
            result |= await compare(load, rounds)
            result |= await gap(load, rounds)
    return {"ar_throughput_ratio": result[f"ar_over_bare_off_{BATCH}"], **result}
