"""What a pipeline file says of a diffusers stage reaches its engine."""

from __future__ import annotations

from omni_rt.config import parse_pipeline
from omni_rt.graph import Graph
from omni_rt.runtime.spec import worker_spec
from omni_rt.runtime.supervisor import Worker
from omni_rt.wire.messages import StageSpec
from omni_rt_workers.engines import diffusers_dit
from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine

from .fakes import RecordingOutbox


def spec(folder: str, options: str) -> StageSpec:
    text = f"""
stages:
  painter: {{engine: diffusers, model: {folder}, device: cpu, max_batch: 2{options}}}
outputs: {{image: painter.image}}
"""
    config = parse_pipeline(text, "painter.yaml")
    worker = Worker(0, "painter", 0, ("painter",), config.stages["painter"].restart)
    made = worker_spec(config, Graph.from_config(config), worker, 1, on_main_thread=True)
    return made.stages[0]


def test_options_of_the_file_are_those_of_the_engine(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    options = (
        ", policy: first_come, slots: 3, limits: {max_side: 64, max_steps: 9, max_pixels: 2000}"
        ", cache: {max_cache_size: 2KiB, cache_strategy: lru}"
    )
    engine = diffusers_dit.make(spec(folders["zimage"], options), out)
    assert isinstance(engine, DiTEngine)
    ports = engine.load(lambda phase, fraction: None)
    limits = {param.name: param.maximum for param in ports.params}
    assert (limits["height"], limits["num_inference_steps"]) == (64, 9)
    assert ports.products[0].maximum == 2000
    assert ports.slots == 3
    cache = engine.cache.config
    assert (cache.max_cache_size, cache.cache_strategy) == (2048, "lru")
    assert cache.keeps("prompt_embeds")
    engine.close()


def test_without_options_nothing_is_kept_and_four_requests_wait_for_each_place(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    engine = diffusers_dit.make(spec(folders["zimage"], ""), out)
    assert isinstance(engine, DiTEngine)
    ports = engine.load(lambda phase, fraction: None)
    assert ports.slots == 8
    assert not engine.cache.config.keeps("prompt_embeds")
    engine.close()
