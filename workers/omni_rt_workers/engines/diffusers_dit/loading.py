"""Loading a pipeline as the stage says."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_rt.errors import ConfigError, nearest

if TYPE_CHECKING:
    from omni_rt.wire.messages import StageSpec

LIMITS = ("max_side", "max_steps", "max_frames", "max_pixels")
_OPTIONS = ("diffusers", "threads", "memory_bytes", "via", "policy", "slots", "cache", *LIMITS)


def check_options(spec: StageSpec) -> None:
    """Raises `ConfigError` for an option that this engine does not have, or a missing model."""
    for name in spec.options:
        if name not in _OPTIONS:
            raise ConfigError(
                f"stage '{spec.name}': engine diffusers has no option '{name}'",
                stage=spec.name,
                hint=nearest(name, _OPTIONS),
            )
    if spec.model is None:
        raise ConfigError(f"stage '{spec.name}' has no model", stage=spec.name)


def source(spec: StageSpec) -> str:
    """The folder to load, or the hub id. A local folder is never looked up in the hub."""
    folder = Path(str(spec.model))
    if not folder.is_dir():
        return str(spec.model)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    part = folder / spec.part if spec.part else folder
    return str(part if part.is_dir() else folder)


def load_pipeline(spec: StageSpec, where: str) -> Any:
    """The pipeline on the stage's device. Options under `diffusers` go to `from_pretrained`."""
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    if spec.device == "cpu":
        torch.set_num_threads(spec.options.get("threads") or 1)
    options = {**_left_out(where), **spec.options.get("diffusers", {})}
    options.setdefault("low_cpu_mem_usage", find_spec("accelerate") is not None)
    default = torch.float32 if spec.device == "cpu" else torch.bfloat16
    options["dtype"] = _dtype(spec, options.pop("torch_dtype", options.pop("dtype", default)))
    try:
        pipeline = DiffusionPipeline.from_pretrained(where, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"stage '{spec.name}': {where} is no diffusers pipeline: {error}", stage=spec.name
        ) from error
    pipeline.to(spec.device)
    _fit(spec, pipeline)
    return pipeline


def _left_out(folder: str) -> dict[str, None]:
    """Parts that the pipeline in `folder` was saved without: diffusers wants to hear it again."""
    index = Path(folder, "model_index.json")
    if not index.is_file():
        return {}
    parts = json.loads(index.read_bytes())
    return {name: None for name, part in parts.items() if part == [None, None]}


def weights_bytes(pipeline: Any) -> int:
    """Of all modules; tensors that modules share count once."""
    import torch

    tensors = {
        id(tensor): tensor.nbytes
        for part in pipeline.components.values()
        if isinstance(part, torch.nn.Module)
        for tensor in (*part.parameters(), *part.buffers())
    }
    return sum(tensors.values())


def room_bytes(spec: StageSpec, weights: int) -> int | None:
    """Bytes that requests may take: of what the stage was given, else of what the device has."""
    if (limit := spec.options.get("memory_bytes")) is not None:
        return int(limit) - weights
    if spec.device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(spec.device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _dtype(spec: StageSpec, dtype: Any) -> Any:
    import torch

    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"stage '{spec.name}': unknown dtype '{dtype}'", stage=spec.name)
    return found


def _fit(spec: StageSpec, pipeline: Any) -> None:
    limit = spec.options.get("memory_bytes")
    weights = weights_bytes(pipeline)
    if limit is not None and weights > limit:
        raise ConfigError(
            f"stage '{spec.name}': the weights take {weights:,} bytes of the {limit:,} it may use",
            stage=spec.name,
            hint="raise its memory or load a smaller dtype",
        )
