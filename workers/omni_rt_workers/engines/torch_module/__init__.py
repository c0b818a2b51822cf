"""The module engine: a stage that is a plain class over torch (`omni_rt_workers.module`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_rt.wire.messages import StageSpec
    from omni_rt_workers.engine import Engine, Outbox


def make(spec: StageSpec, out: Outbox) -> Engine:
    from omni_rt_workers.engines.torch_module.engine import TorchEngine

    return TorchEngine(spec, out)
