"""The DiT engine: any diffusers pipeline, unmodified, many requests at once.

Each request runs the pipeline's own `__call__` in a fibre; whenever it calls a heavy module it is
parked, and parked calls that fit are run as one. Nothing heavy is imported before `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_rt.wire.messages import StageSpec
    from omni_rt_workers.engine import Engine, Outbox


def make(spec: StageSpec, out: Outbox) -> Engine:
    from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine

    return DiTEngine(spec, out)
