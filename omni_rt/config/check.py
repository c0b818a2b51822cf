"""What types cannot say about a pipeline: stages, edges and outputs that do not go together."""

from __future__ import annotations

import os.path

from omni_rt.config.model import AR_ENGINES, SECTIONS, PipelineConfig, StageConfig
from omni_rt.config.source import Path, Source
from omni_rt.config.wiring import Ends, find_fault, stage_of
from omni_rt.errors import nearest

# Engines that report no facts, whatever their options.
_FACTLESS = ("echo", "diffusers", "torch")


def check_pipeline(config: PipelineConfig, source: Source) -> None:
    """Raises `ConfigError` with the place of the first thing that is wrong."""
    if not config.stages:
        raise source.error(("stages",), "there is no stage")
    if not config.outputs:
        raise source.error(("outputs",), "there is no output")
    for name in config.stages:
        _check_stage(config, name, source)
    for k in range(len(config.edges)):
        _check_edge(config, k, source)
    for name, port in config.outputs.items():
        _check_port(config, port, ("outputs", name), source)
    edges = [Ends(edge.source, edge.target) for edge in config.edges]
    if fault := find_fault(tuple(config.stages), edges):
        raise source.error(("edges", fault.edge), fault.what, fault.hint)


def check_folders(config: PipelineConfig, source: Source) -> None:
    """Model folders, which are absolute by now, must exist; anything else is a hub's id."""
    places: dict[Path, str | None] = {("model",): config.model}
    places |= {("stages", name, "model"): stage.model for name, stage in config.stages.items()}
    for path, model in places.items():
        if model is not None and model.startswith("/") and not os.path.isdir(model):
            hint = "write a folder's path, relative to the file, or a hub id"
            raise source.error(path, f"there is no folder {model}", hint)
    for name, stage in config.stages.items():
        model = stage.model or config.model
        if stage.part and model and os.path.isdir(model):
            part = os.path.join(model, stage.part)
            if not os.path.isdir(part):
                raise source.error(("stages", name, "part"), f"there is no folder {part}")


def _check_stage(config: PipelineConfig, name: str, source: Source) -> None:
    stage = config.stages[name]
    here = ("stages", name)
    for engine in SECTIONS:
        if engine != stage.engine and getattr(stage, engine):
            hint = f"its options belong under '{_options_key(stage)}'"
            raise source.error((*here, engine), f"the engine is {stage.engine}", hint)
    if stage.options and stage.engine in SECTIONS:
        hint = f"its options belong under '{stage.engine}'"
        raise source.error((*here, "options"), f"the engine is {stage.engine}", hint)
    for key in ("hidden", "facts", "lora", "tool_parser"):
        if getattr(stage, key) and stage.engine not in AR_ENGINES:
            what = f"only stages of {', '.join(AR_ENGINES)} have '{key}', not {stage.engine}"
            raise source.error((*here, key), what)
    for key in ("steps", "policy", "slots", "limits", "cache"):
        if getattr(stage, key) is not None and stage.engine != "diffusers":
            raise source.error((*here, key), f"only diffusers has '{key}', not {stage.engine}")
    for key in ("module", "dtype"):
        if getattr(stage, key) and stage.engine != "torch":
            raise source.error((*here, key), f"only torch has '{key}', not {stage.engine}")
    if stage.engine == "torch" and stage.module is None:
        hint = "name its class: package.module:Class"
        raise source.error((*here, "module"), "the stage has no module", hint)
    if stage.engine in ("vllm", "diffusers") and not (stage.model or config.model):
        what = "the stage has no model, and neither has the pipeline"
        raise source.error((*here, "model"), what)
    if stage.worker is not None:
        _check_shared(config, name, source)


def _options_key(stage: StageConfig) -> str:
    return stage.engine if stage.engine in SECTIONS else "options"


def _check_shared(config: PipelineConfig, name: str, source: Source) -> None:
    """Stages that share a process: one vLLM engine at most, alike in all that the process has."""
    stage = config.stages[name]
    for other, its in config.stages.items():
        if other == name or (its.worker or other) != stage.worker:
            continue
        if stage.engine == its.engine == "vllm":
            what = f"a process holds one vLLM engine; {other} has one as well"
            raise source.error(("stages", name, "worker"), what)
        for key in ("replicas", "restart"):
            if getattr(stage, key) != getattr(its, key):
                what = f"{name} and {other} share a process and so '{key}'"
                raise source.error(("stages", name, key), what, "write the same for both")
        if {one.device.partition(":")[0] for one in (stage, its)} == {"cpu", "cuda"}:
            what = f"{name} and {other} share a process and so the kind of 'device'"
            hint = "put both on the CPU or both on GPUs"
            raise source.error(("stages", name, "device"), what, hint)


def _check_edge(config: PipelineConfig, k: int, source: Source) -> None:
    edge = config.edges[k]
    path = ("edges", k)
    producer = _check_port(config, edge.source, (*path, "from"), source)
    _check_port(config, edge.target, (*path, "to"), source)
    if edge.when is None:
        return
    if edge.stream is not None:
        what = "an edge with a condition cannot stream: facts are known at the producer's end"
        raise source.error((*path, "stream"), what)
    fact = edge.when.removeprefix("not ")
    name = stage_of(edge.source)
    if producer.engine in AR_ENGINES and fact not in producer.facts:
        hint = f"declare it under its 'facts'; {nearest(fact, producer.facts)}"
        raise source.error((*path, "when"), f"stage {name} reports no fact '{fact}'", hint)
    if producer.engine in _FACTLESS:
        what = f"stage {name} reports no facts: its engine is {producer.engine}"
        raise source.error((*path, "when"), what)


def _check_port(config: PipelineConfig, port: str, path: Path, source: Source) -> StageConfig:
    stage = stage_of(port)
    if stage not in config.stages:
        raise source.error(path, f"there is no stage '{stage}'", nearest(stage, config.stages))
    return config.stages[stage]
