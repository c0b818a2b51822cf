"""POST /v1/requests/{id}/cancel."""

from __future__ import annotations

from litestar import post
from litestar.di import NamedDependency
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from omni_rt.server.state import Served


@post("/v1/requests/{request_id:str}/cancel", status_code=200, sync_to_thread=False)
def cancel_request(served: NamedDependency[Served], request_id: FromPath[str]) -> dict[str, object]:
    """Cancel a running request; its id is the reply's without the prefix."""
    if not served.omni.cancel(request_id.removeprefix("chatcmpl-")):
        raise NotFoundException(f"no request '{request_id[:64]}' is running")
    return {"id": request_id, "cancelled": True}
