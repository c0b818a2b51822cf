"""From a stage's description to its module."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch

from omni_rt.errors import ConfigError, nearest
from omni_rt.wire.messages import StageSpec
from omni_rt_workers.engine import Say
from omni_rt_workers.module import Module, Setup, Window

_OPTIONS = ("options", "module", "dtype", "threads", "via")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_module(spec: StageSpec, say: Say) -> Module:
    """Raises `ConfigError` for a class that is not there or is no module."""
    for name in spec.options:
        if name not in _OPTIONS:
            hint = nearest(name, _OPTIONS)
            raise ConfigError(f"engine torch has no option '{name}'", stage=spec.name, hint=hint)
    if spec.device == "cpu":
        torch.set_num_threads(spec.options.get("threads") or 1)
    say("importing the module", 0.0)
    made = _class(str(spec.options.get("module")))
    say("loading weights", 0.1)
    module = made(_setup(spec, say))
    _check(spec.name, module)
    return module


def _class(path: str) -> type[Module]:
    name, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        hint = "its folder must be in PYTHONPATH"
        raise ConfigError(f"cannot find the module '{path}': {error}", hint=hint) from error
    if not (isinstance(found, type) and issubclass(found, Module)):
        raise ConfigError(f"'{path}' is no subclass of omni_rt_workers.module.Module")
    return found


def _setup(spec: StageSpec, say: Say) -> Setup:
    default = "float32" if spec.device == "cpu" else "bfloat16"
    dtype = _DTYPES[spec.options.get("dtype") or default]
    return Setup(
        torch.device(spec.device), dtype, _weights(spec), spec.options.get("options", {}), say
    )


def _weights(spec: StageSpec) -> Path | None:
    """The model's folder. A hub id is looked up in the local cache, and else fetched."""
    if spec.model is None:
        return None
    folder = Path(spec.model)
    if folder.is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    else:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(spec.model))
    part = folder / spec.part if spec.part else folder
    return part if part.is_dir() else folder


def _check(stage: str, module: Module) -> None:
    windows = [name for name, window in module.inputs.items() if isinstance(window, Window)]
    if len(windows) > 1:
        raise ConfigError(
            f"only one input may have a window, not {', '.join(windows)}", stage=stage
        )
    if "audio" in module.outputs.values() and module.sample_rate <= 0:
        raise ConfigError("an output of kind audio needs a sample_rate", stage=stage)
