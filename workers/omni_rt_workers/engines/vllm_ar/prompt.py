"""From what a request says to the token ids of its prompt; tokens that stand for facts."""

from __future__ import annotations

from typing import Any

from omni_rt.errors import BadRequest, ConfigError, nearest


def token_ids(values: dict[str, Any], tokenizer: Any) -> list[int]:
    """The prompt of a request, from `prompt_token_ids`, `messages` or `prompt`, whichever is first.

    A `prompt` for a model with a chat template becomes one user message; otherwise it is
    completed as it stands. Raises `BadRequest` for an empty or impossible prompt.
    """
    if values.get("prompt_token_ids") is not None:
        return _given(values["prompt_token_ids"])
    if values.get("messages"):
        return _chat(list(values["messages"]), tokenizer, "messages")
    prompt = values.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    if tokenizer.chat_template:
        return _chat([{"role": "user", "content": prompt}], tokenizer, "prompt")
    ids: list[int] = tokenizer.encode(prompt)
    return ids


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


def _chat(messages: list[dict[str, Any]], tokenizer: Any, param: str) -> list[int]:
    if not tokenizer.chat_template:
        raise BadRequest(
            "the model has no chat template", param=param, hint="send `prompt` instead of messages"
        )
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # whatever the model's own template raises
        raise BadRequest(f"the chat template refused the messages: {error}", param=param) from error
    return ids
