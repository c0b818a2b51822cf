"""From a stage's description to vLLM's engine arguments, and the environment vLLM reads."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_rt.errors import ConfigError, nearest

if TYPE_CHECKING:
    from omni_rt.wire.messages import StageSpec

_HERE = "omni_rt_workers.engines.vllm_ar"
_OPTIONS = ("vllm", "hidden", "facts", "lora", "tool_parser", "memory_bytes", "threads", "via")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, that vLLM makes room for
_ROWS = ("reply", "prompt", "all")
_KV_CACHE_BYTES = 64 << 20  # on CPU, if the stage does not say


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """Which hidden states the port `hidden` gives: a layer by transformers' numbering of
    `output_hidden_states` (-1 is after the final norm), and the rows of the prompt, of the reply
    or of both. The reply's last token is never computed on, so M tokens give M - 1 rows."""

    layer: int = -1
    rows: str = "reply"


def check_options(spec: StageSpec) -> Hidden:
    """Raises `ConfigError` for an option that this engine does not have, or a missing model."""
    _refuse_unknown(spec.name, "engine vllm has no option", spec.options, _OPTIONS)
    if spec.model is None:
        raise ConfigError(f"stage '{spec.name}' has no model", stage=spec.name)
    if spec.model.startswith("/") and not Path(spec.model).is_dir():
        raise ConfigError(f"stage '{spec.name}': there is no folder {spec.model}", stage=spec.name)
    _lora(spec)
    given = spec.options.get("hidden") or {}
    _refuse_unknown(spec.name, "hidden has no option", given, ("layer", "rows"))
    hidden = Hidden(**given)
    if hidden.rows not in _ROWS or type(hidden.layer) is not int:
        raise ConfigError(
            f"stage '{spec.name}': hidden must be like {{layer: -1, rows: reply}}, not {given}",
            stage=spec.name,
            hint=f"layer is an integer, rows one of: {', '.join(_ROWS)}",
        )
    return hidden


def source(spec: StageSpec) -> str:
    """The folder to load, or the hub id. A local folder is never looked up in the hub."""
    folder = Path(str(spec.model))
    if not folder.is_dir():
        return str(spec.model)
    part = folder / spec.part if spec.part else folder
    return str(part if part.is_dir() else folder)


def set_environment(spec: StageSpec) -> None:
    """What vLLM and the libraries under it read when they are imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core lives in this process
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if Path(source(spec)).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
    if spec.device == "cpu":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # other stages share the cores
        threads = int(spec.options.get("threads") or 1)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def engine_args(spec: StageSpec, hidden: Hidden) -> Any:
    """vLLM's `EngineArgs`; what the stage has under `vllm:` wins. Raises `ConfigError`."""
    from vllm import EngineArgs

    given = dict(spec.options.get("vllm") or {})
    valid = [field.name for field in dataclasses.fields(EngineArgs)]
    _refuse_unknown(spec.name, "vLLM has no engine argument", given, valid)
    own = {"hidden_layer": hidden.layer, "embeds": "embeds" in spec.credits}
    given["additional_config"] = {**own, **given.get("additional_config", {})}
    defaults = {
        "model": source(spec),
        "max_model_len": -1,  # what the model can, or as much of it as the KV cache holds
        "max_num_seqs": spec.max_batch,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    return EngineArgs(**{**defaults, **_device_defaults(spec), **_lora(spec), **given})


def adapters(spec: StageSpec) -> dict[str, Any]:
    """vLLM's `LoRARequest`s of the stage's adapters, by name."""
    from vllm.lora.request import LoRARequest

    named = spec.options.get("lora") or {}
    return {
        name: LoRARequest(name, number, folder)
        for number, (name, folder) in enumerate(named.items(), 1)
    }


def _lora(spec: StageSpec) -> dict[str, Any]:
    """Room for the stage's adapters. Raises `ConfigError` for a folder that has none."""
    named = spec.options.get("lora") or {}
    if not named:
        return {}
    rank = max(_rank(spec.name, name, folder) for name, folder in named.items())
    if rank > _RANKS[-1]:
        raise ConfigError(f"stage '{spec.name}': lora: rank {rank} is above {_RANKS[-1]}")
    # On CPU, requests without an adapter are computed with the one in the last slot if others in
    # the batch have one (vLLM 0.32 indexes it with -1), so there that slot always stays empty.
    slots = len(named) + 1 if spec.device == "cpu" else min(len(named), spec.max_batch)
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": max(slots, len(named)),
        "max_lora_rank": next(room for room in _RANKS if room >= rank),
    }


def _rank(stage: str, name: str, folder: str) -> int:
    try:
        return int(json.loads((Path(folder) / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"stage '{stage}': lora.{name}: {folder} has no adapter: {error}",
            stage=stage,
            hint="a folder with adapter_config.json and adapter_model.safetensors",
        ) from error


def _device_defaults(spec: StageSpec) -> dict[str, Any]:
    memory: int | None = spec.options.get("memory_bytes")
    if spec.device == "cpu":
        return {
            "worker_cls": f"{_HERE}.worker.OmniCPUWorker",
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,  # the CPU's attention wants a multiple of 32
            "kv_cache_memory_bytes": memory or _KV_CACHE_BYTES,
        }
    found: dict[str, Any] = {"worker_cls": f"{_HERE}.worker.OmniGPUWorker"}
    if ":" in spec.device:
        found["device_ids"] = [int(spec.device.rpartition(":")[2])]
    if memory is not None:
        found["gpu_memory_utilization"] = memory / _device_bytes(spec.device)
    return found


def _device_bytes(device: str) -> int:
    import torch

    total: int = torch.cuda.get_device_properties(device).total_memory
    return total


def set_scheduler(config: Any) -> None:
    """Which of the two holding schedulers fits is known once vLLM has settled its configuration."""
    scheduling = config.scheduler_config
    if scheduling.scheduler_cls is None:
        name = "OmniARAsyncScheduler" if scheduling.async_scheduling else "OmniARScheduler"
        scheduling.scheduler_cls = f"{_HERE}.scheduler.{name}"


def said(error: Exception) -> str:
    """vLLM's complaint in one line; its settings are checked by pydantic, which is wordy."""
    if not callable(errors := getattr(error, "errors", None)):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in errors())


def _refuse_unknown(stage: str, what: str, given: dict[str, Any], valid: Any) -> None:
    for name in given:
        if name not in valid:
            raise ConfigError(
                f"stage '{stage}': {what} '{name}'", stage=stage, hint=nearest(name, valid)
            )
