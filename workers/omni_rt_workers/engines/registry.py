"""Engines by name, each imported only when a stage asks for it."""

from __future__ import annotations

import importlib

from omni_rt.errors import ConfigError, nearest
from omni_rt_workers.engine import MakeEngine

_MODULES = {
    "echo": "omni_rt_workers.engines.echo",
    "simulated": "omni_rt_workers.engines.simulated",
    "vllm": "omni_rt_workers.engines.vllm_ar",
    "diffusers": "omni_rt_workers.engines.diffusers_dit",
}


def find(name: str) -> MakeEngine:
    """The maker of engine `name`. Raises `ConfigError` for a name that there is not."""
    if name not in _MODULES:
        raise ConfigError(f"there is no engine '{name}'", hint=nearest(name, _MODULES))
    make: MakeEngine = importlib.import_module(_MODULES[name]).make
    return make
