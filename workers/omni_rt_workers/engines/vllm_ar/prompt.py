"""From what a request says to the token ids of its prompt; tokens that stand for facts."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omni_rt.errors import BadRequest, ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with one placeholder for each picture, sound and film, and these in order."""

    ids: list[int]
    files: list[dict[str, Any]] = field(default_factory=list)  # {"type", "data", "media_type"}
    options: dict[str, Any] = field(default_factory=dict)  # vLLM's `mm_processor_kwargs`


Build = Callable[[list[dict[str, Any]], Any, dict[str, Any]], Prompt]
"""(messages, tokenizer, more values for the chat template) -> the prompt."""

# Model families with a way of their own, by `model_type` of the checkpoint: "module:function" of a
# `Build`. All others have what their chat template makes.
FAMILIES: dict[str, str] = {}


def builder(model_type: str) -> Build:
    module, _, function = FAMILIES.get(model_type, "").partition(":")
    if not module:
        return from_template
    build: Build = getattr(importlib.import_module(module), function)
    return build


def prompt_of(
    values: dict[str, Any], tokenizer: Any, build: Build, more: dict[str, Any] | None = None
) -> Prompt:
    """The prompt of a request, from `prompt_token_ids`, `messages` or `prompt`, whichever is first.

    A `prompt` for a model with a chat template becomes one user message; otherwise it is
    completed as it stands. Raises `BadRequest` for an empty or impossible prompt.
    """
    if values.get("prompt_token_ids") is not None:
        return Prompt(_given(values["prompt_token_ids"]))
    messages = list(values.get("messages") or ())
    prompt = values.get("prompt")
    if not messages and (not isinstance(prompt, str) or not prompt):
        raise BadRequest("the prompt is empty", param="prompt")
    if not messages and not tokenizer.chat_template:
        return Prompt(tokenizer.encode(prompt))
    param = param_of(values)
    if not tokenizer.chat_template:
        raise BadRequest(
            "the model has no chat template", param=param, hint="send `prompt` instead of messages"
        )
    try:
        return build(messages or [{"role": "user", "content": prompt}], tokenizer, more or {})
    except BadRequest:
        raise
    except Exception as error:  # whatever the model's own template raises
        raise BadRequest(f"the chat template refused the messages: {error}", param=param) from error


def from_template(messages: list[dict[str, Any]], tokenizer: Any, more: dict[str, Any]) -> Prompt:
    """What the model's chat template makes of the messages, parts as transformers has them."""
    ids: list[int] = tokenizer.apply_chat_template(
        [_turn(message) for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **more,
    )
    return Prompt(ids, files_of(messages))


def files_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of the messages that are pictures, sound or film, in order."""
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] != "text"
    ]


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates know it: text alone as a string, files without their bytes."""
    turn = dict(message)
    parts = message.get("content")
    if isinstance(parts, list):
        only_text = all(part["type"] == "text" for part in parts)
        turn["content"] = (
            "".join(part["text"] for part in parts) if only_text else [_bare(p) for p in parts]
        )
    if message.get("tool_calls"):
        turn["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return turn


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name in ("type", "text")}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they are given them as an object."""
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError:
        arguments = call["arguments"]
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def param_of(values: dict[str, Any]) -> str:
    """The field that the prompt came from, for errors about it."""
    names = ("prompt_token_ids", "messages", "prompt")
    return next((name for name in names if values.get(name)), "prompt")


def fact_tokens(named: dict[str, str], tokenizer: Any) -> dict[int, str]:
    """Token id -> name of the fact. The tokens become special ones, so that they are never text.

    `named` is the stage's `facts`, like {"image": "<|image|>"}. Raises `ConfigError`.
    """
    ids = tokenizer.get_vocab()
    for name, token in named.items():
        if token not in ids:
            raise ConfigError(
                f"facts.{name}: the tokenizer has no token '{token}'",
                hint=nearest(token, tokenizer.get_added_vocab()),
            )
    tokenizer.add_tokens(list(named.values()), special_tokens=True)
    return {ids[token]: name for name, token in named.items()}


def _given(ids: Any) -> list[int]:
    if not isinstance(ids, list | tuple) or not all(type(one) is int for one in ids):
        raise BadRequest("prompt_token_ids must be a list of integers", param="prompt_token_ids")
    if not ids:
        raise BadRequest("the prompt is empty", param="prompt_token_ids")
    return list(ids)
