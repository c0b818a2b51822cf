"""vLLM-omni's names: thin forms of what is here, on the same runtime. See docs/names.md."""

from omni_rt.compat.command import OmniServeCommand
from omni_rt.compat.llm import AsyncOmniLLM, OmniLLM
from omni_rt.compat.results import (
    CompletionOutput,
    EngineOutput,
    MultimodalOutputProcessor,
    RequestOutput,
)
from omni_rt.compat.stages import DiTCacheConfig, DiTCacheTensor, DiTConfig, OmniStageConfig

__all__ = [
    "AsyncOmniLLM",
    "CompletionOutput",
    "DiTCacheConfig",
    "DiTCacheTensor",
    "DiTConfig",
    "EngineOutput",
    "MultimodalOutputProcessor",
    "OmniLLM",
    "OmniServeCommand",
    "OmniStageConfig",
    "RequestOutput",
]
