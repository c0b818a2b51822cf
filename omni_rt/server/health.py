"""/live, /ready, /health: is the process there, can it answer, how is each stage."""

from __future__ import annotations

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency

from omni_rt.runtime.status import StageStatus, Status
from omni_rt.server.state import Served


class StageHealth(msgspec.Struct):
    state: str
    pid: int | None
    device: str
    restarts: int
    phase: str
    error: str | None


class EdgeHealth(msgspec.Struct):
    transport: str  # how large tensors cross: "local", "cuda" or "shm"
    about: str


class Health(msgspec.Struct):
    status: str
    running: int  # requests accepted and not ended
    stages: dict[str, StageHealth]
    edges: dict[str, EdgeHealth]


@get("/live", sync_to_thread=False)
def live() -> dict[str, str]:
    """The server process answers."""
    return {"status": "live"}


@get("/ready", sync_to_thread=False)
def ready(served: NamedDependency[Served]) -> Response[dict[str, object]]:
    """200 if every stage can work, else 503 with the reasons."""
    status = served.omni.status()
    reasons = [
        f"{name}: {stage.error or stage.phase}"
        for name, stage in status.stages.items()
        if stage.state != "ready"
    ]
    body: dict[str, object] = {"status": status.state, "reasons": reasons}
    return Response(body, status_code=_code(status))


@get("/health", sync_to_thread=False)
def health(served: NamedDependency[Served]) -> Response[Health]:
    status = served.omni.status()
    stages = {name: _stage(stage) for name, stage in status.stages.items()}
    edges = {name: EdgeHealth(edge.transport, edge.about) for name, edge in status.edges.items()}
    body = Health(status.state, status.live, stages, edges)
    return Response(body, status_code=_code(status))


def _stage(stage: StageStatus) -> StageHealth:
    return StageHealth(
        stage.state, stage.pid, stage.device, stage.restarts, stage.phase, stage.error
    )


def _code(status: Status) -> int:
    return 200 if status.state == "ready" else 503
