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
    "torch": "omni_rt_workers.engines.torch_module",
}


def find(name: str) -> MakeEngine:
    """The maker of engine `name`, or of a user's own engine, given as "module:function".

    Raises `ConfigError` for a name that there is not. The module of a user's engine is looked for
    on the worker's path: put its folder into PYTHONPATH.
    """
    module, _, function = name.partition(":")
    if not function and name not in _MODULES:
        raise ConfigError(f"there is no engine '{name}'", hint=nearest(name, _MODULES))
    try:
        make: MakeEngine = getattr(
            importlib.import_module(_MODULES.get(name, module)), function or "make"
        )
    except (ModuleNotFoundError, AttributeError) as error:
        if not function:
            raise
        hint = "its folder must be in PYTHONPATH"
        raise ConfigError(f"cannot find the engine '{name}': {error}", hint=hint) from error
    return make
