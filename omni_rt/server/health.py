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


class Health(msgspec.Struct):
    status: str
    running: int  # requests accepted and not ended
    stages: dict[str, StageHealth]


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
    body = Health(status.state, status.live, {name: _stage(s) for name, s in status.stages.items()})
    return Response(body, status_code=_code(status))


def _stage(stage: StageStatus) -> StageHealth:
    return StageHealth(
        stage.state, stage.pid, stage.device, stage.restarts, stage.phase, stage.error
    )


def _code(status: Status) -> int:
    return 200 if status.state == "ready" else 503
