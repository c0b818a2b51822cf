"""Calls of tools as OpenAI has them: in the messages of a request, and in replies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from omni_rt.errors import BadRequest
from omni_rt.request import CallPiece, ToolCall


class Function(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct, omit_defaults=True):
    """Of a message, where it has no index, or a piece of it in a delta."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: Function = msgspec.field(default_factory=Function)


def said_before(calls: list[Call] | None, where: str) -> tuple[ToolCall, ...]:
    """The calls of an assistant's earlier turn."""
    return tuple(_said(call, f"{where}[{k}]") for k, call in enumerate(calls or ()))


def _said(call: Call, where: str) -> ToolCall:
    if call.function.name is None:
        raise BadRequest("a call has no function.name", param=f"{where}.function.name")
    return ToolCall(call.id or "", call.function.name, call.function.arguments or "")


def choice_of(tool_choice: str | dict[str, Any] | None) -> str | None:
    if tool_choice in (None, "auto", "none"):
        return tool_choice if isinstance(tool_choice, str) else None
    raise BadRequest(
        "the model decides itself which tools it calls",
        param="tool_choice",
        hint="write auto or none",
    )


def pieces(calls: Iterable[CallPiece]) -> list[Call]:
    """For a delta: what is new of each call."""
    return [
        Call(
            piece.call,
            piece.id or None,
            "function" if piece.id else None,
            Function(piece.name or None, piece.arguments),
        )
        for piece in calls
    ]


def whole(calls: Iterable[CallPiece]) -> list[Call]:
    """For a message: all pieces of each call joined."""
    found: dict[int, Call] = {}
    for piece in calls:
        call = found.setdefault(piece.call, Call(None, "", "function", Function("", "")))
        call.id = f"{call.id}{piece.id}"
        call.function.name = f"{call.function.name}{piece.name}"
        call.function.arguments = f"{call.function.arguments}{piece.arguments}"
    return [found[number] for number in sorted(found)]
