"""Every error that omni-rt raises on purpose, under one root.

They are split by what the caller can do about them: mend the request (`BadRequest`), try later
(`Overloaded`, `StageUnavailable`), report a fault (`StageFailed`), or nothing (`Cancelled`,
`DeadlineExceeded`). Each says which request and stage it concerns and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class OmniError(Exception):
    """Root of all errors raised by omni-rt.

    `message` says what happened; `hint` says what to do; `request` and `stage` say to whom it
    happened; `detail` holds a remote traceback as text, if the error came out of a worker.
    """

    kind: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        request: str | None = None,
        stage: str | None = None,
        hint: str | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.stage = stage
        self.hint = hint
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class ConfigError(OmniError):
    """Raised when a pipeline file is wrong; the message names the file, the line and the path."""

    kind = "config"


class BadRequest(OmniError):
    """Raised when a request cannot be served as it is; `param` names the field to mend."""

    kind = "bad_request"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        request: str | None = None,
        stage: str | None = None,
        hint: str | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message, request=request, stage=stage, hint=hint, detail=detail)
        self.param = param


class Overloaded(OmniError):
    """Raised when a queue is full; the request was not accepted. Try again in `retry_after_s`."""

    kind = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, stage: str | None = None
    ) -> None:
        super().__init__(message, stage=stage, hint=f"try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class StageUnavailable(OmniError):
    """Raised when a stage that the request needs is down or not loaded yet."""

    kind = "stage_unavailable"


class StageFailed(OmniError):
    """Raised when a stage failed while it worked on the request, or its process died."""

    kind = "stage_failed"


class Cancelled(OmniError):
    """Raised when the request was cancelled by its owner or by the server's end."""

    kind = "cancelled"


class DeadlineExceeded(OmniError):
    """Raised when the request's deadline passed before it was finished."""

    kind = "deadline_exceeded"


class StaleRef(OmniError):
    """Raised when a tensor ref names a block that has been freed or reused: a bug, never data."""

    kind = "stale_ref"


class ProtocolError(OmniError):
    """Raised when the two sides of a channel do not speak the same protocol."""

    kind = "protocol"


_BY_KIND: dict[str, type[OmniError]] = {
    cls.kind: cls
    for cls in (
        OmniError,
        ConfigError,
        StageUnavailable,
        StageFailed,
        Cancelled,
        DeadlineExceeded,
        StaleRef,
        ProtocolError,
    )
}


def from_wire(
    kind: str,
    message: str,
    *,
    request: str,
    stage: str,
    param: str | None = None,
    detail: str | None = None,
) -> OmniError:
    """The error that a worker described; a kind unknown here becomes `StageFailed`."""
    if kind == BadRequest.kind:
        return BadRequest(message, param=param, request=request, stage=stage, detail=detail)
    cls = _BY_KIND.get(kind, StageFailed)
    return cls(message, request=request, stage=stage, detail=detail)


def nearest(name: str, valid: Iterable[str]) -> str:
    """How an error names what would have been right: the closest name first, then all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names) or "none"
    return f"did you mean '{close[0]}'? (valid: {listed})" if close else f"valid: {listed}"
