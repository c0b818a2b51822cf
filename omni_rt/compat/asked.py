"""From the arguments of each stage to requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omni_rt.errors import BadRequest
from omni_rt.request import ChatMessage, Request

_OF_REQUEST = ("seed", "priority", "deadline_s", "label", "playback")


def requests(
    names: Sequence[str], stage_args_list: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]
) -> list[Request]:
    """A request for each prompt of the first stage's arguments.

    A stage's other arguments, and those in its `sampling_params`, are its parameters; `shared`
    has parameters of all stages. Raises `BadRequest`.
    """
    if len(stage_args_list) != len(names):
        raise BadRequest(
            f"there are {len(names)} stages and arguments for {len(stage_args_list)}",
            param="stage_args_list",
            hint="give a mapping for each stage, empty if need be",
        )
    first = dict(stage_args_list[0])
    asked = _asked(first)
    fields = {name: value for name, value in shared.items() if name in _OF_REQUEST}
    params = {name: value for name, value in shared.items() if name not in _OF_REQUEST}
    stage_params = {}
    for name, args in zip(names, (first, *stage_args_list[1:]), strict=True):
        own = _parameters(name, args)
        if "seed" in own:
            fields.setdefault("seed", own.pop("seed"))
        if own:
            stage_params[name] = own
    return [Request(**one, **fields, params=params, stage_params=stage_params) for one in asked]


def _asked(first: dict[str, Any]) -> list[dict[str, Any]]:
    """Taken out of the arguments: what each request asks."""
    prompt, messages = first.pop("prompt", None), first.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise BadRequest(
            "the first stage needs a prompt or messages, and not both", param="stage_args_list"
        )
    if messages is not None:
        return [{"messages": tuple(map(_message, messages))}]
    return [{"prompt": one} for one in ([prompt] if isinstance(prompt, str) else prompt)]


def _message(message: ChatMessage | Mapping[str, Any]) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    return ChatMessage(message["role"], message["content"])


def _parameters(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(args)
    sampling = own.pop("sampling_params", None) or {}
    if not isinstance(sampling, Mapping):
        raise BadRequest(
            f"sampling_params of {name} is {type(sampling).__name__}",
            param="sampling_params",
            hint="give a mapping, such as {'temperature': 0.0}",
        )
    if "prompt" in own or "messages" in own:
        raise BadRequest(
            f"{name} gets the output of the stage before it, no prompt", param="prompt"
        )
    return {**sampling, **own}
