"""The web application over one running pipeline."""

from __future__ import annotations

import secrets
from email.utils import formatdate
from typing import Any

from litestar import Litestar, Response
from litestar import Request as HttpRequest
from litestar.di import Provide
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.types import Message, Scope

from omni_rt.errors import OmniError
from omni_rt.runtime.omni import AsyncOmni
from omni_rt.server import errors
from omni_rt.server.chat import chat
from omni_rt.server.health import health, live, ready
from omni_rt.server.images import generate_images
from omni_rt.server.models import get_model, list_models
from omni_rt.server.requests import cancel_request
from omni_rt.server.state import Served

MAX_BODY_BYTES = 32 << 20


def create_app(omni: AsyncOmni) -> Litestar:
    """The routes over `omni`, whose life is the caller's."""
    served = Served(omni)
    return Litestar(
        [live, ready, health, list_models, get_model, chat, generate_images, cancel_request],
        dependencies={"served": Provide(lambda: served, sync_to_thread=False)},
        exception_handlers={
            OmniError: errors.on_omni_error,
            ExceptionGroup: _on_group,
            ValidationException: errors.on_validation_error,
            HTTPException: errors.on_http_error,
            RecursionError: errors.on_deep_nesting,
            Exception: errors.on_bug,
        },
        before_send=[_add_headers],
        request_max_body_size=MAX_BODY_BYTES,
        # The document alone: pages that show it load scripts from elsewhere.
        openapi_config=OpenAPIConfig(
            title="omni-rt", version="1", render_plugins=[JsonRenderPlugin()]
        ),
        logging_config=None,
        signature_namespace={"Served": Served},
    )


def _on_group(
    request: HttpRequest[Any, Any, Any], group: ExceptionGroup[Exception]
) -> Response[errors.ErrorReply]:
    """Several requests of one call ran side by side: the first error speaks for them."""
    error = group.exceptions[0]
    if isinstance(error, OmniError):
        return errors.on_omni_error(request, error)
    return errors.on_bug(request, error)


async def _add_headers(message: Message, scope: Scope) -> None:
    """Every response, errors too, has a date and an id: the client's own if it sent one."""
    if message["type"] != "http.response.start":
        return
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    own = given if given.isascii() and 0 < len(given) <= 128 else secrets.token_hex(8).encode()
    date = formatdate(usegmt=True).encode()
    message["headers"] = [*message["headers"], (b"x-request-id", own), (b"date", date)]
