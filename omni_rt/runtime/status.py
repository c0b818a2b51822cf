"""How the runtime is: for `/health`, `/ready` and the progress display."""

from __future__ import annotations

from typing import Literal

import msgspec

from omni_rt.config import PipelineConfig
from omni_rt.runtime.core import Core
from omni_rt.runtime.spec import device_of
from omni_rt.runtime.supervisor import Worker, WorkerState
from omni_rt.wire.messages import Transport


class StageStatus(msgspec.Struct, frozen=True):
    state: Literal["loading", "ready", "restarting", "down"]
    pid: int | None
    device: str
    restarts: int
    phase: str  # what it is doing while it loads
    fraction: float  # of the load
    error: str | None  # its process's own last words, until it is ready again
    queued: int
    running: int


class EdgeStatus(msgspec.Struct, frozen=True):
    transport: Transport  # of large tensors: "local", "cuda" or "shm"
    about: str  # in words, with the reason


class Status(msgspec.Struct, frozen=True):
    state: Literal["loading", "ready", "degraded", "stopping", "failed"]
    stages: dict[str, StageStatus]
    live: int  # requests accepted and not ended
    counters: dict[str, int]
    edges: dict[str, EdgeStatus] = {}


def status_of(core: Core, config: PipelineConfig) -> Status:
    stages = {name: _stage(core, config, name) for name in config.stages}
    state = _overall(core, stages)
    return Status(state, stages, len(core.flows), dict(core.counters), _edges(core))


def _edges(core: Core) -> dict[str, EdgeStatus]:
    edges: dict[str, EdgeStatus] = {}
    for edge in core.graph.edges:
        transport, about = core.admission.transports()[str(edge)], "same process"
        if transport != "local":
            transport, about = core.links.transport(edge)
        edges[str(edge)] = EdgeStatus(transport, about)
    return edges


def _stage(core: Core, config: PipelineConfig, name: str) -> StageStatus:
    workers = [w for w in core.supervisor.workers if name in w.stages]
    worker = min(workers, key=_rank)  # the replica that is best off speaks for the stage
    phase, fraction = worker.phase.get(name, ("starting", 0.0))
    stage = core.stages[name]
    return StageStatus(
        _state(worker),
        worker.pid,
        device_of(config, name, worker.replica),
        sum(w.restarts for w in workers),
        phase,
        fraction,
        worker.error,
        stage.waiting,
        stage.running,
    )


def _state(worker: Worker) -> Literal["loading", "ready", "restarting", "down"]:
    if worker.state is WorkerState.READY:
        return "ready"
    if worker.down or worker.state is WorkerState.STOPPED:
        return "down"
    return "restarting" if worker.ever_ready else "loading"


def _rank(worker: Worker) -> int:
    return ("ready", "loading", "restarting", "down").index(_state(worker))


def _overall(
    core: Core, stages: dict[str, StageStatus]
) -> Literal["loading", "ready", "degraded", "stopping", "failed"]:
    if core.closing:
        return "stopping"
    states = {stage.state for stage in stages.values()}
    if any(w.state is WorkerState.FAILED for w in core.supervisor.workers):
        return "failed"
    if states == {"ready"}:
        return "loading" if core.links.settling else "ready"
    return "loading" if states <= {"ready", "loading"} else "degraded"
