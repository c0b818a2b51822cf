"""What vLLM is told of in each of its processes, by its plugin group `vllm.general_plugins`.

Workers and schedulers of ours need no telling, as vLLM takes them by their names. Model classes
do: they are known by architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# architecture -> "module:Class", imported by vLLM only when a model of it is loaded. Families whose
# language models vLLM has itself need no entry.
MODELS: dict[str, str] = {}


def register(models: Mapping[str, str] = MODELS) -> None:
    """Called by vLLM, in a process perhaps more than once: what it knows is left as it is."""
    if not models:
        return
    from vllm import ModelRegistry

    registry: Any = ModelRegistry
    known = set(registry.get_supported_archs())
    for architecture, where in models.items():
        if architecture not in known:
            registry.register_model(architecture, where)
