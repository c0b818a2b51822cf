"""From one stage's configuration to what a pipeline file says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omni_rt.compat.stages import DiTCacheConfig, DiTConfig, OmniStageConfig
from omni_rt.compat.vllm_config import engine_arguments
from omni_rt.config import SECTIONS
from omni_rt.errors import ConfigError, nearest

ENGINES = {"AR": "vllm", "DiT": "diffusers"}
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


def engine_of(stage: OmniStageConfig) -> str:
    """The engine's name, or module:function. Raises `ConfigError` for vLLM's executors."""
    executor = stage.executor_class
    if executor is None:
        return ENGINES[stage.engine_type]
    if isinstance(executor, str):
        return executor
    if executor.__module__.partition(".")[0] == "vllm":
        raise ConfigError(
            f"stage {stage.stage_id}: {executor.__name__} is vLLM's; a stage runs in a worker",
            hint="leave executor_class out, and name vLLM's in vllm_config as "
            "distributed_executor_backend",
        )
    return f"{executor.__module__}:{executor.__qualname__}"


def described(stage: OmniStageConfig) -> dict[str, Any]:
    """The value under `stages:`. Raises `ConfigError`."""
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
