"""What the handlers share: the runtime and what it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from omni_rt.errors import BadRequest, OmniError, StageUnavailable, nearest
from omni_rt.request import Request
from omni_rt.runtime.omni import AsyncOmni
from omni_rt.runtime.stream import Stream
from omni_rt.server.errors import UnknownModel

log = logging.getLogger(__name__)

# What a message to a worker can carry.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# Exact in clients whose numbers are floats, with room for the index of each of n replies.
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 16)]

# Names of unknown fields come from outside: neither kept nor logged without end.
_MAX_NOTED = 100

# Fields of OpenAI's or of other servers that would change the reply, and what to do about each:
# refused rather than ignored, unless their value is empty and so asks for nothing.
_REFUSED = {
    "audio": "leave it out",
    "functions": "leave it out",
    "height": "use size, as WIDTHxHEIGHT",
    "mask": "leave it out",
    "sampling_params_list": "leave it out",
    "width": "use size, as WIDTHxHEIGHT",
}


class PictureFields(msgspec.Struct, kw_only=True):
    """Extensions that say how a picture is made, on every route that can make one."""

    size: str | None = None
    num_inference_steps: Int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    scheduler: str | None = None
    exact: bool | None = None

    def params(self) -> dict[str, Any]:
        return {
            **size_params(self.size),
            **set_fields(
                num_inference_steps=self.num_inference_steps,
                guidance_scale=self.guidance_scale,
                negative_prompt=self.negative_prompt,
                scheduler=self.scheduler,
                exact=self.exact,
            ),
        }


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
        except OmniError as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, BadRequest) and error.param in ("width", "height"):
                error.param = "size"  # as it is called in the body
            elif isinstance(error, BadRequest) and error.param == "voice":
                error.param = "audio.voice"
            elif isinstance(error, BadRequest) and error.param == "structured_outputs":
                error.param = "response_format"
            raise
        return streams

    def check_unknown(self, body: Mapping[str, Any], known: Iterable[str]) -> None:
        """Clients send fields of other servers: say once that a field has no effect.

        Raises `BadRequest` for one that would have changed the reply.
        """
        for name in set(body) - set(known):
            if name in _REFUSED and body[name]:
                raise BadRequest(f"'{name}' is not supported here", param=name, hint=_REFUSED[name])
            if name not in self._noted and len(self._noted) < _MAX_NOTED:
                self._noted.add(name)
                log.warning("the request field %.64r is not known here and has no effect", name)


def set_fields(**fields: Any) -> dict[str, Any]:
    """Those that were set: None means unset, 0 and "" are values."""
    return {name: value for name, value in fields.items() if value is not None}


def size_params(size: str | None) -> dict[str, int]:
    """ "128x64" -> width and height; "auto" leaves the model's own."""
    if size is None or size == "auto":
        return {}
    width, _, height = size.partition("x")
    if not (width.isdecimal() and height.isdecimal()) or len(size) > 24:
        raise BadRequest(
            f"size must be WIDTHxHEIGHT or 'auto', got '{size[:40]}'",
            param="size",
            hint="for example 128x128",
        )
    return {"width": int(width), "height": int(height)}
