"""vLLM's engine arguments out of what a stage was given: a mapping, or a whole `VllmConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_rt.errors import ConfigError

# What is read of a `VllmConfig`, by its parts; the engine argument if that is called otherwise.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "model_config": {
        name: name
        for name in (
            "dtype",
            "enforce_eager",
            "max_logprobs",
            "max_model_len",
            "quantization",
            "revision",
            "seed",
            "tokenizer",
        )
    },
    "cache_config": {
        name: name
        for name in (
            "block_size",
            "cache_dtype",
            "enable_prefix_caching",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
        )
    }
    | {"cache_dtype": "kv_cache_dtype"},
    "parallel_config": {
        "pipeline_parallel_size": "pipeline_parallel_size",
        "tensor_parallel_size": "tensor_parallel_size",
    },
    "scheduler_config": {
        "async_scheduling": "async_scheduling",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "max_num_seqs": "max_num_seqs",
    },
}


def engine_arguments(given: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A mapping as it is; of a `VllmConfig` what it says in plain values. Raises `ConfigError`."""
    if isinstance(given, Mapping):
        return dict(given)
    if not hasattr(given, "model_config"):
        raise ConfigError(
            f"vllm_config is {type(given).__name__}",
            hint="give a mapping of vLLM's engine arguments, or a VllmConfig",
        )
    arguments = {
        argument: _told(getattr(getattr(given, part, None), name, None))
        for part, names in _ARGUMENTS.items()
        for name, argument in names.items()
    }
    if extra := getattr(given, "additional_config", None):
        arguments["additional_config"] = dict(extra)
    return {name: value for name, value in arguments.items() if value is not None}


def _told(value: Any) -> Any:
    """torch's dtypes by their names; nothing of what is no plain value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = str(value)
    return name.removeprefix("torch.") if name.startswith("torch.") else None
