"""What the handlers share: the runtime and what it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_rt.errors import BadRequest, OmniError, StageUnavailable, nearest
from omni_rt.request import Request
from omni_rt.runtime.omni import AsyncOmni
from omni_rt.runtime.stream import Stream
from omni_rt.server.errors import UnknownModel

log = logging.getLogger(__name__)


@dataclass
class Served:
    """One pipeline behind the API."""

    omni: AsyncOmni
    created: int = field(default_factory=lambda: int(time.time()))
    _noted: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.omni.config.name

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise UnknownModel(model, self.name)

    def check_ready(self) -> None:
        """Raise `StageUnavailable` that says what each stage is doing, while some still load."""
        status = self.omni.status()
        if status.state == "loading":
            doing = ", ".join(
                f"{name}: {stage.phase} ({stage.fraction:.0%})"
                for name, stage in status.stages.items()
                if stage.state != "ready"
            )
            raise StageUnavailable(f"the model is loading: {doing}")

    def outputs_of(self, kinds: Iterable[str], param: str) -> tuple[str, ...]:
        """The pipeline's outputs of these kinds. Raises `BadRequest` for a kind it lacks."""
        offered = self.omni.kinds()
        wanted: list[str] = []
        for kind in kinds:
            names = [name for name, has in offered.items() if has == kind]
            if not names:
                raise BadRequest(
                    f"the model gives no '{kind}'",
                    param=param,
                    hint=nearest(kind, set(offered.values())),
                )
            wanted += names
        return tuple(wanted)

    def submit_all(self, requests: list[Request]) -> list[Stream]:
        """Submit all of them or, if one is refused on the way, none."""
        streams: list[Stream] = []
        try:
            for request in requests:
                streams.append(self.omni.submit(request))  # noqa: PERF401
        except OmniError:
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def note_unknown(self, body: Mapping[str, Any], known: Iterable[str]) -> None:
        """Clients send fields of other servers: say once that a field has no effect."""
        for name in set(body) - set(known) - self._noted:
            self._noted.add(name)
            log.warning("the request field '%s' is not known here and has no effect", name)


def set_fields(**fields: Any) -> dict[str, Any]:
    """Those that were set: None means unset, 0 and "" are values."""
    return {name: value for name, value in fields.items() if value is not None}


def size_params(size: str | None) -> dict[str, int]:
    """ "128x64" -> width and height; "auto" leaves the model's own."""
    if size is None or size == "auto":
        return {}
    width, _, height = size.partition("x")
    if not (width.isdecimal() and height.isdecimal()) or len(size) > 12:
        raise BadRequest(
            f"size must be WIDTHxHEIGHT or 'auto', got '{size[:40]}'",
            param="size",
            hint="for example 128x128",
        )
    return {"width": int(width), "height": int(height)}
