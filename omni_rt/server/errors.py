"""Every error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import msgspec
from litestar import Request as HttpRequest
from litestar import Response
from litestar.exceptions import HTTPException, ValidationException

from omni_rt.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    OmniError,
    Overloaded,
    StageUnavailable,
)

log = logging.getLogger(__name__)

_STATUS: list[tuple[type[OmniError], int, str]] = [
    (BadRequest, 400, "invalid_request_error"),
    (Overloaded, 429, "overloaded_error"),
    (StageUnavailable, 503, "service_unavailable_error"),
    (DeadlineExceeded, 504, "timeout_error"),
    (Cancelled, 499, "cancelled_error"),
]
_CODES = {400: None, 404: "not_found", 405: "method_not_allowed", 413: "too_large"}


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class UnknownModel(OmniError):
    """Raised when a request names a model that is not served."""

    kind = "model_not_found"

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"the model '{model}' is not served here; served: {served}")


def reply_of(error: Exception) -> tuple[int, ErrorBody]:
    """Status and body of an error; one that is not ours is a bug and logged whole."""
    if not isinstance(error, OmniError):
        log.error("internal error", exc_info=error)
        what = f"internal error: {type(error).__name__}"
        return 500, ErrorBody(what, "server_error", None, "internal")
    if isinstance(error, UnknownModel):
        return 404, ErrorBody(str(error), "invalid_request_error", "model", error.kind)
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            param = error.param if isinstance(error, BadRequest) else None
            code = None if kind is BadRequest else error.kind
            return status, ErrorBody(str(error), name, param, code)
    if error.detail:
        log.error("request %s: %s\n%s", error.request, error, error.detail)
    return 500, ErrorBody(str(error), "server_error", None, error.kind)


def on_omni_error(_: HttpRequest[Any, Any, Any], error: OmniError) -> Response[ErrorReply]:
    status, body = reply_of(error)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    elif isinstance(error, StageUnavailable):
        headers["Retry-After"] = "1"
    return Response(ErrorReply(body), status_code=status, headers=headers)


def on_validation_error(
    _: HttpRequest[Any, Any, Any], error: ValidationException
) -> Response[ErrorReply]:
    """A body that does not fit its struct: names the field."""
    extra = error.extra if isinstance(error.extra, list) else []
    first = extra[0] if extra and isinstance(extra[0], dict) else {}
    what = str(first.get("message") or error.detail)
    if what == "'data'":  # the framework's words for it
        what = "the body is empty; it must be a JSON object"
    found = re.search(r"field `(\w+)`", what)
    where = str(first.get("key") or "").removeprefix("data")
    param = ".".join(filter(None, (where, found[1] if found else ""))) or None
    message = f"{param}: {what}" if param else what
    return Response(ErrorReply(ErrorBody(message, "invalid_request_error", param)), status_code=400)


def on_http_error(_: HttpRequest[Any, Any, Any], error: HTTPException) -> Response[ErrorReply]:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = ErrorBody(str(error.detail), kind, None, _CODES.get(error.status_code))
    headers = dict(error.headers or {})
    return Response(ErrorReply(body), status_code=error.status_code, headers=headers)


def on_bug(request: HttpRequest[Any, Any, Any], error: Exception) -> Response[ErrorReply]:
    """Our own mistake: logged whole, told in one line."""
    log.error("%s %s failed", request.method, request.url.path)
    status, body = reply_of(error)
    return Response(ErrorReply(body), status_code=status)


def on_deep_nesting(_: HttpRequest[Any, Any, Any], __: RecursionError) -> Response[ErrorReply]:
    """Only the JSON decoder recurses, as deep as the body is nested."""
    body = ErrorBody("the body is nested too deeply", "invalid_request_error")
    return Response(ErrorReply(body), status_code=400)
