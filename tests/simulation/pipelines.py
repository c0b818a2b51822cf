"""Pipelines for the simulation, and what each must answer: computed without the runtime."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from omni_rt.config import PipelineConfig, parse_pipeline
from omni_rt.graph import Edge, Graph, Plan
from omni_rt_workers.engines.simulated import _hash, digest

CHAIN = """
stages:
  writer:  {engine: simulated, max_batch: 3, queue: 6, arena: 64KiB, simulated: {step_s: 0.02, steps: 6, facts: %(facts)s, ports: {text: {every: 1}, hidden: {bytes: 3000}}}}
  painter: {engine: simulated, max_batch: 2, queue: 8, arena: 64KiB, simulated: {step_s: 0.03, steps: 4, inputs: [prompt_embeds], ports: {image: {bytes: 500}}}}
edges:
  - {from: writer.hidden, to: painter.prompt_embeds, when: image}
outputs: {text: writer.text, image: painter.image}
"""
STREAM = """
stages:
  thinker: {engine: simulated, max_batch: 4, queue: 8, arena: 16KiB, simulated: {step_s: 0.02, steps: 8, ports: {text: {every: 2}, hidden: {bytes: 900, every: 1}}}}
  talker:  {engine: simulated, max_batch: 4, queue: 8, arena: 16KiB, simulated: {step_s: 0.01, inputs: [hidden], ports: {codes: {bytes: 40, every: 1}}}}
  vocoder: {engine: simulated, max_batch: 4, queue: 8, arena: 16KiB, simulated: {step_s: 0.005, inputs: [codes], ports: {audio: {bytes: 1600, every: 1}, tail: {bytes: 100}}}}
edges:
  - {from: thinker.hidden, to: talker.hidden, stream: {first: 2}}
  - {from: talker.codes, to: vocoder.codes, stream: {first: 1}}
outputs: {text: thinker.text, audio: vocoder.audio, tail: vocoder.tail}
"""
DIAMOND = """
stages:
  source: {engine: simulated, max_batch: 4, queue: 9, arena: 24KiB, simulated: {step_s: 0.01, steps: 3, facts: [left], ports: {a: {bytes: 2500}, b: {bytes: 1200}}}}
  left:   {engine: simulated, max_batch: 2, queue: 9, arena: 24KiB, simulated: {step_s: 0.04, steps: 2, inputs: [x], ports: {y: {bytes: 2000}}}}
  right:  {engine: simulated, max_batch: 2, queue: 9, arena: 24KiB, replicas: 2, simulated: {step_s: 0.02, steps: 5, inputs: [x], ports: {y: {bytes: 2200}}}}
  never:  {engine: simulated, max_batch: 2, queue: 9, arena: 24KiB, simulated: {step_s: 0.02, steps: 5, inputs: [x], ports: {y: {bytes: 2200}}}}
  join:   {engine: simulated, max_batch: 3, queue: 9, arena: 24KiB, simulated: {step_s: 0.02, steps: 2, inputs: [l, r, n], ports: {text: {}, out: {bytes: 700}}}}
edges:
  - {from: source.a, to: left.x, when: left}
  - source.b -> right.x
  - {from: source.b, to: never.x, when: not left}
  - left.y -> join.l
  - right.y -> join.r
  - never.y -> join.n
outputs: {text: join.text, out: join.out, early: left.y}
"""
SHARED = """
stages:
  encoder: {engine: simulated, worker: one, max_batch: 2, queue: 8, arena: 32KiB, simulated: {step_s: 0.01, steps: 3, ports: {embeds: {bytes: 2000}}}}
  dit:     {engine: simulated, worker: one, max_batch: 2, queue: 8, arena: 32KiB, simulated: {step_s: 0.02, steps: 4, inputs: [embeds], ports: {latents: {bytes: 1500, every: 2}}}}
  vae:     {engine: simulated, max_batch: 2, queue: 8, arena: 32KiB, simulated: {step_s: 0.01, steps: 1, inputs: [latents], ports: {image: {bytes: 600}}}}
edges:
  - encoder.embeds -> dit.embeds
  - dit.latents -> vae.latents
outputs: {image: vae.image}
"""
_RESTART = "restart: {max_deaths: 4, backoff_s: 0.05, backoff_max_s: 1, wait_s: %s}"


def draw(rng: random.Random, devices: random.Random | None = None) -> PipelineConfig:
    """A pipeline; with `devices`, one whose stages are on devices, with small pools."""
    text = rng.choice([CHAIN, STREAM, DIAMOND, SHARED])
    if text is CHAIN:
        text = text % {"facts": rng.choice(["[image]", "[image]", "[]"])}
    restart = _RESTART % rng.choice([0.2, 2, 60])
    text = text.replace("engine: simulated,", f"engine: simulated, {restart},")
    if devices is not None:
        text = re.sub("engine: simulated,", lambda _: _on_device(text, devices), text)
    if rng.random() < 0.2:
        text = re.sub("queue: [0-9]+", "queue: 0", text)
    return parse_pipeline(f"heartbeat_s: 5\nstall_s: 3\nload_stall_s: 5\n{text}", "simulated.yaml")


def _on_device(text: str, rng: random.Random) -> str:
    if "worker: one" not in text and rng.random() < 0.1:
        return "engine: simulated, device: cpu,"
    pool = rng.choice(["null", "6KiB", "12KiB", "40KiB", "40KiB"])
    return f"engine: simulated, device: 'cuda:{rng.choice([0, 0, 1, 2])}', pool: {pool},"


class Expected:
    """What a request must get, for every output: the pieces in order, as bytes or text."""

    def __init__(self, config: PipelineConfig, plan: Plan, prompt: str, steps: int | None) -> None:
        self._config = config
        self._plan = plan
        self._prompt = prompt
        self._steps = steps
        self._known: dict[tuple[str, str], list[bytes]] = {}

    def outputs(self) -> dict[str, list[bytes]]:
        return {name: self.chunks(*where) for name, where in self._plan.outputs.items()}

    def chunks(self, stage: str, port: str) -> list[bytes]:
        if (stage, port) not in self._known:
            self._known[stage, port] = list(self._chunks(stage, port))
        return self._known[stage, port]

    def _chunks(self, stage: str, port: str) -> Iterator[bytes]:
        if not self._runs(stage):
            return
        options = self._config.stages[stage].simulated
        ports = options["ports"]
        size, every = ports[port].get("bytes", 32), ports[port].get("every", 0)
        edges = [edge for edge in self._plan.edges if edge.target == stage]
        streamed = next((edge for edge in edges if edge.stream), None)
        inputs = {
            e.target_port: self.chunks(e.source, e.source_port) for e in edges if self._holds(e)
        }
        whole = [_hash(inputs[name]) for name in sorted(inputs)]
        prompt = "" if edges else self._prompt
        if streamed:
            steps = len(inputs[streamed.target_port])
        else:
            steps = self._steps or options.get("steps", 10)
        count = 1 if not every else steps // every
        for number in range(count):
            seen = whole
            if streamed and every:
                seen = [_hash([inputs[streamed.target_port][number]])]
            mark = digest(stage, port, number, prompt, seen)
            yield mark.hex().encode() if port == "text" else (mark * (size // 16 + 1))[:size]

    def _runs(self, stage: str) -> bool:
        edges = [edge for edge in self._plan.edges if edge.target == stage]
        return not edges or any(self._holds(edge) for edge in edges)

    def _holds(self, edge: Edge) -> bool:
        facts = self._config.stages[edge.source].simulated.get("facts", [])
        when = edge.when
        met = when is None or (when.removeprefix("not ") in facts) != when.startswith("not ")
        return met and self._runs(edge.source)


def graph_of(config: PipelineConfig) -> Graph:
    return Graph.from_config(config)
