"""What describes a chain of stages in Python: the configurations by vLLM-omni's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from omni_rt.compat.results import RequestOutput


@dataclass(slots=True)
class DiTCacheTensor:
    """A kind of tensor that is kept between requests: "prompt_embeds"."""

    name: str


@dataclass(slots=True)
class DiTCacheConfig:
    """What a DiT stage keeps, how many bytes of it, and what goes first: "fifo" or "lru"."""

    cache_tensors: list[DiTCacheTensor]
    max_cache_size: int  # bytes
    cache_strategy: str = "fifo"
    enable_optimization: bool = True  # False: nothing is kept


@dataclass(slots=True)
class DiTConfig:
    """A diffusion model. Every one runs on diffusers, whatever `use_diffusers` says."""

    model_type: str  # a word for people; the model's folder says what it is
    scheduler_type: str  # diffusers' class name, a short one ("euler"), or "default": its own
    num_inference_steps: int
    guidance_scale: float
    use_diffusers: bool = False
    diffusers_pipeline: str | None = None  # the class that the model's folder must name


@dataclass(slots=True)
class OmniStageConfig:
    """One stage of a chain."""

    stage_id: int
    engine_type: Literal["AR", "DiT"]
    model_path: str  # folder or hub id
    input_modalities: list[str]
    output_modalities: list[str]
    # vLLM's engine arguments, or its VllmConfig; the options of an engine named below.
    vllm_config: Mapping[str, Any] | Any = None
    executor_class: str | type | None = None  # an engine: a name or module:function; default: own
    dit_config: DiTConfig | None = None
    cache_config: DiTCacheConfig | None = None
    stage_output: list[RequestOutput] | None = None  # of the latest run
