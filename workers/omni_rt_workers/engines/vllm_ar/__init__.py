"""The AR engine: any causal language model that vLLM runs, in the worker's own process.

vLLM's `LLMEngine` is driven step by step through its public seams: a worker class that takes
hidden states out, a scheduler class that can hold requests. Nothing heavy is imported before
`load`. At most one such engine lives in a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_rt.wire.messages import StageSpec
    from omni_rt_workers.engine import Engine, Outbox


def make(spec: StageSpec, out: Outbox) -> Engine:
    from omni_rt_workers.engines.vllm_ar.engine import AREngine

    return AREngine(spec, out)
