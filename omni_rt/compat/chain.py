"""From a list of stage configurations to a pipeline: the same graph as that of a file, a chain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omni_rt.compat.stages import DiTCacheConfig, DiTConfig, OmniStageConfig
from omni_rt.compat.vllm_config import engine_arguments
from omni_rt.config import SECTIONS, PipelineConfig
from omni_rt.config.check import check_folders
from omni_rt.config.load import build, merged
from omni_rt.errors import ConfigError, nearest

_ENGINES = {"AR": "vllm", "DiT": "diffusers"}
_ALIASES = {
    "hidden_states": "hidden",
    "embeddings": "hidden",
    "prompt_embeds": "hidden",
    "latent": "latents",
}
# Ports by modality. An engine of one's own has the ports of its type, and further ones that are
# called what their modalities are.
_INPUTS: dict[str, dict[str, str]] = {
    "AR": {},
    "DiT": {"text": "prompt", "hidden": "prompt_embeds", "image": "image", "latents": "latents"},
}
_OUTPUTS: dict[str, dict[str, str]] = {
    "AR": {"text": "text", "hidden": "hidden", "logprobs": "logprobs"},
    "DiT": {"image": "image", "latents": "latents"},
}
_SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "flow_match_euler": "FlowMatchEulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "lms": "LMSDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "unipc": "UniPCMultistepScheduler",
}


@dataclass(frozen=True, slots=True)
class Chain:
    """A pipeline with a list of outputs for each stage, and for the result."""

    config: PipelineConfig
    names: tuple[str, ...]  # of the stages, in order
    shown: tuple[tuple[str, ...], ...]  # outputs of each stage
    result: tuple[str, ...]  # outputs that make the result


def chain(stages: Sequence[OmniStageConfig]) -> Chain:
    """Raises `ConfigError` for stages that do not go together."""
    if not stages:
        raise ConfigError("there is no stage", hint="give a list of OmniStageConfig")
    for stage in stages:
        _check_type(stage)
    names = tuple(f"stage_{stage.stage_id}" for stage in stages)
    if len(set(names)) < len(names):
        raise ConfigError(f"stage_id must differ: {[stage.stage_id for stage in stages]}")
    edges = [
        f"{names[k]}.{source} -> {names[k + 1]}.{target}"
        for k in range(len(stages) - 1)
        for source, target in _joined(stages[k], stages[k + 1])
    ]
    shown = [
        [f"{names[k]}.{port}" for port in _shown(stage, names[k], edges)]
        for k, stage in enumerate(stages)
    ]
    result = _result(stages, names, shown)
    value = {
        "name": "omni",
        "stages": {name: _stage(stage) for name, stage in zip(names, stages, strict=True)},
        "edges": edges,
        "outputs": {_name(port): port for ports in (*shown, result) for port in ports},
    }
    return Chain(
        _config(value),
        names,
        tuple(tuple(map(_name, ports)) for ports in shown),
        tuple(map(_name, result)),
    )


def _config(value: dict[str, Any]) -> PipelineConfig:
    try:
        text = yaml.safe_dump(value, sort_keys=False)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"stage_configs: only plain values can be told to a stage: {error}"
        ) from (error)
    source = merged(text, "stage_configs", Path.cwd())
    config = build(source)
    check_folders(config, source)
    return config


def _name(port: str) -> str:
    return port.replace(".", "_")


# ---- ports


def _joined(before: OmniStageConfig, after: OmniStageConfig) -> list[tuple[str, str]]:
    """Output and input port of everything that both stages name."""
    if after.engine_type == "AR":
        raise ConfigError(
            f"stage {after.stage_id}: an AR stage takes the request itself and must come first"
        )
    given = {_plain(modality) for modality in before.output_modalities}
    pairs = [
        (_port(before, modality, _OUTPUTS), _port(after, modality, _INPUTS))
        for modality in map(_plain, after.input_modalities)
        if modality in given
    ]
    if not pairs:
        raise ConfigError(
            f"stage {after.stage_id} takes {after.input_modalities}, and stage "
            f"{before.stage_id} gives {before.output_modalities}",
            hint="they need a modality in common",
        )
    return pairs


def _shown(stage: OmniStageConfig, name: str, edges: list[str]) -> list[str]:
    """Its ports that are outputs of the pipeline. A picture that goes on into another stage does
    so as a tensor and cannot be encoded as well; its latents can be had."""
    own = [m for m in map(_plain, stage.output_modalities) if _has(stage, m)]
    ports = [_port(stage, modality, _OUTPUTS) for modality in own]
    if any(edge.startswith(f"{name}.image ") for edge in edges):
        ports = ["latents" if port == "image" else port for port in ports]
    return list(dict.fromkeys(ports))


def _result(
    stages: Sequence[OmniStageConfig], names: Sequence[str], shown: list[list[str]]
) -> list[str]:
    """The last stage's outputs. What its engine does not have comes from the stage before."""
    ports = list(shown[-1])
    for modality in map(_plain, stages[-1].output_modalities):
        if _has(stages[-1], modality):
            continue
        giver = next(
            (k for k in reversed(range(len(stages) - 1)) if _gives(stages[k], modality)), -1
        )
        if giver < 0:
            raise ConfigError(
                f"stage {stages[-1].stage_id}: no stage gives '{modality}'",
                hint="a stage of its type has: " + ", ".join(_OUTPUTS[stages[-1].engine_type]),
            )
        ports.append(f"{names[giver]}.{_port(stages[giver], modality, _OUTPUTS)}")
    if not ports:
        raise ConfigError(f"stage {stages[-1].stage_id} has no output_modalities")
    return ports


def _gives(stage: OmniStageConfig, modality: str) -> bool:
    return _has(stage, modality) and modality in map(_plain, stage.output_modalities)


def _has(stage: OmniStageConfig, modality: str) -> bool:
    if modality in _OUTPUTS[stage.engine_type]:
        return True
    return _is_own(stage) and not any(modality in ports for ports in _OUTPUTS.values())


def _port(stage: OmniStageConfig, modality: str, table: Mapping[str, Mapping[str, str]]) -> str:
    ports = table[stage.engine_type]
    if modality in ports or _is_own(stage):
        return ports.get(modality, modality)
    what = f"stage {stage.stage_id}: a stage of type {stage.engine_type} has no '{modality}' here"
    raise ConfigError(what, hint=nearest(modality, ports))


def _is_own(stage: OmniStageConfig) -> bool:
    return engine_of(stage) not in _ENGINES.values()


def _plain(modality: str) -> str:
    return _ALIASES.get(modality, modality)


# ---- stages


def _check_type(stage: OmniStageConfig) -> None:
    if stage.engine_type not in _ENGINES:
        what = f"stage {stage.stage_id}: there is no engine_type '{stage.engine_type}'"
        raise ConfigError(what, hint=nearest(str(stage.engine_type), _ENGINES))


def engine_of(stage: OmniStageConfig) -> str:
    """The engine's name, or module:function. Raises `ConfigError` for vLLM's executors."""
    executor = stage.executor_class
    if executor is None:
        return _ENGINES[stage.engine_type]
    if isinstance(executor, str):
        return executor
    if executor.__module__.partition(".")[0] == "vllm":
        raise ConfigError(
            f"stage {stage.stage_id}: {executor.__name__} is vLLM's; a stage runs in a worker",
            hint="leave executor_class out, and name vLLM's in vllm_config as "
            "distributed_executor_backend",
        )
    return f"{executor.__module__}:{executor.__qualname__}"


def _stage(stage: OmniStageConfig) -> dict[str, Any]:
    engine = engine_of(stage)
    value: dict[str, Any] = {"engine": engine, "model": stage.model_path}
    if engine == "diffusers":
        return value | _diffusion(stage)
    if stage.cache_config is not None or stage.dit_config is not None:
        what = "cache_config" if stage.dit_config is None else "dit_config"
        raise ConfigError(f"stage {stage.stage_id}: {what} is for DiT stages on diffusers")
    if stage.vllm_config is None:
        return value
    options = engine_arguments(stage.vllm_config)
    if engine == "vllm" and "hidden_layer" in (options.get("additional_config") or {}):
        extra = dict(options.pop("additional_config"))
        value["hidden"] = {"layer": extra.pop("hidden_layer")}
        options |= {"additional_config": extra} if extra else {}
    return value | {engine if engine in SECTIONS else "options": options}


def _diffusion(stage: OmniStageConfig) -> dict[str, Any]:
    if stage.vllm_config is not None:
        raise ConfigError(f"stage {stage.stage_id}: a DiT stage has no vllm_config")
    if stage.dit_config is None:
        raise ConfigError(f"stage {stage.stage_id}: a DiT stage needs its dit_config")
    dit = stage.dit_config
    _check_class(dit, stage.model_path)
    sampling: dict[str, Any] = {"guidance_scale": dit.guidance_scale}
    if scheduler := _scheduler(dit.scheduler_type):
        sampling["scheduler"] = scheduler
    value = {"steps": dit.num_inference_steps, "sampling": sampling}
    return value if stage.cache_config is None else value | {"cache": _cache(stage.cache_config)}


def _scheduler(name: str) -> str | None:
    """diffusers' class, None for the pipeline's own."""
    if name in ("", "default"):
        return None
    if name.endswith("Scheduler"):
        return name
    if name not in _SCHEDULERS:
        hint = nearest(name, _SCHEDULERS) + ", or a class name of diffusers, or default"
        raise ConfigError(f"there is no scheduler_type '{name}'", hint=hint)
    return _SCHEDULERS[name]


def _check_class(dit: DiTConfig, folder: str) -> None:
    if dit.diffusers_pipeline is None:
        return
    try:
        found = json.loads(Path(folder, "model_index.json").read_bytes())["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} does not say which pipeline it holds, so it cannot be compared with "
            f"diffusers_pipeline '{dit.diffusers_pipeline}'",
            hint="leave diffusers_pipeline out or give a diffusers folder",
        ) from error
    if found != dit.diffusers_pipeline:
        raise ConfigError(f"{folder} holds a {found}, not a {dit.diffusers_pipeline}")


def _cache(config: DiTCacheConfig) -> dict[str, Any]:
    if config.max_cache_size < 0:
        raise ConfigError(f"max_cache_size is {config.max_cache_size} bytes, below 0")
    value: dict[str, Any] = {
        "cache_tensors": [tensor.name for tensor in config.cache_tensors],
        "cache_strategy": config.cache_strategy,
        "enable_optimization": config.enable_optimization and config.max_cache_size > 0,
    }
    if config.max_cache_size > 0:
        value["max_cache_size"] = f"{config.max_cache_size / 1024:.10f}KiB"
    return value
