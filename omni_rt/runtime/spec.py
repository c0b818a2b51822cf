"""What a worker is told at its start, from the pipeline's config. Plain values."""

from __future__ import annotations

import functools
import glob
from typing import Any

import msgspec

from omni_rt.config import SECTIONS, PipelineConfig, StageConfig, parse_bytes
from omni_rt.graph import Graph
from omni_rt.runtime.supervisor import Worker
from omni_rt.wire.arena import TABLE_BYTES
from omni_rt.wire.messages import PROTOCOL_VERSION, StageSpec, WorkerSpec
from omni_rt.wire.tensors import INLINE_LIMIT_BYTES

_ALIGN_BYTES = 64  # of what is in an arena


def worker_spec(
    config: PipelineConfig,
    graph: Graph,
    worker: Worker,
    main_pid: int,
    *,
    on_main_thread: bool,
) -> WorkerSpec:
    return WorkerSpec(
        version=PROTOCOL_VERSION,
        identity=worker.identity,
        epoch=worker.epoch,
        main_pid=main_pid,
        die_with_thread=on_main_thread,
        arena=worker.arena,
        arena_bytes=shared_size(config, worker),
        inline_limit_bytes=INLINE_LIMIT_BYTES,
        stages=tuple(
            _stage_spec(config, graph, name, worker, arena_size(config, worker))
            for name in worker.stages
        ),
        device=worker.device,
        pool=worker.pool,
        pool_bytes=pool_size(config, worker),
        pool_readers=worker.readers,
        table=arena_size(config, worker) if worker.pool else 0,
    )


def arena_size(config: PipelineConfig, worker: Worker) -> int:
    """Bytes of shared memory the worker writes blocks to: the sum over its stages."""
    size = sum(parse_bytes(config.stages[name].arena) for name in worker.stages)
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def shared_size(config: PipelineConfig, worker: Worker) -> int:
    """The same with the table of its pool, if it has one."""
    return arena_size(config, worker) + (TABLE_BYTES if worker.readers else 0)


def pool_size(config: PipelineConfig, worker: Worker) -> int:
    """Bytes of device memory for outputs: the sum over its stages. 0: tensors do not stay there."""
    sizes = (config.stages[name].pool for name in worker.stages)
    return sum(parse_bytes(size) for size in sizes if size is not None)


def device_of(config: PipelineConfig, stage: str, replica: int) -> str:
    """The device of a stage's replica: as configured; `auto` spreads over the GPUs there are."""
    device = config.stages[stage].device
    if device != "auto":
        return device
    gpus = gpu_count()
    workers = list(dict.fromkeys(s.worker or name for name, s in config.stages.items()))
    place = workers.index(config.stages[stage].worker or stage) + replica  # one device a worker
    return f"cuda:{place % gpus}" if gpus else "cpu"


@functools.cache
def gpu_count() -> int:
    """GPUs of this machine, by their device files: main has no library to ask."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _stage_spec(
    config: PipelineConfig, graph: Graph, name: str, worker: Worker, arena_bytes: int
) -> StageSpec:
    stage = config.stages[name]
    ports = {edge.source_port for edge in graph.edges if edge.source == name}
    ports |= {port for source, port in graph.outputs.values() if source == name}
    share = arena_bytes // max(1, len(ports) * len(worker.stages))
    return StageSpec(
        name=name,
        engine=stage.engine,
        model=stage.model or config.model,
        part=stage.part,
        device=device_of(config, name, worker.replica),
        max_batch=stage.max_batch,
        options=_options(stage, graph, name),
        sampling=_sampling(stage),
        credits=dict.fromkeys(ports, share),
    )


def _options(stage: StageConfig, graph: Graph, name: str) -> dict[str, Any]:
    key = stage.engine if stage.engine in SECTIONS else "options"
    options: dict[str, Any] = {key: getattr(stage, key)}
    if stage.hidden is not None:
        options["hidden"] = {"layer": stage.hidden.layer, "rows": stage.hidden.rows}
    if stage.facts:
        options["facts"] = stage.facts
    if stage.lora:
        options["lora"] = stage.lora
    if stage.tool_parser is not None:
        options["tool_parser"] = stage.tool_parser
    if stage.module is not None:
        options["module"] = stage.module
    if stage.dtype is not None:
        options["dtype"] = stage.dtype
    if stage.threads is not None:
        options["threads"] = stage.threads
    if stage.memory is not None:
        options["memory_bytes"] = parse_bytes(stage.memory)
    if stage.policy is not None:
        options["policy"] = stage.policy
    if stage.slots is not None:
        options["slots"] = stage.slots
    if stage.limits is not None:
        options |= msgspec.structs.asdict(stage.limits)
    if stage.cache is not None:
        size = parse_bytes(stage.cache.max_cache_size)
        options["cache"] = {**msgspec.structs.asdict(stage.cache), "max_cache_size": size}
    via = {edge.target_port: edge.via for edge in graph.edges if edge.target == name and edge.via}
    if via:
        options["via"] = via
    return options


def _sampling(stage: StageConfig) -> dict[str, Any]:
    steps = {} if stage.steps is None else {"num_inference_steps": stage.steps}
    return {**steps, **stage.sampling}
