"""Request parameters and what vLLM makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from omni_rt.errors import BadRequest, nearest
from omni_rt.wire.messages import ParamSpec

if TYPE_CHECKING:
    from omni_rt_workers.engine import Task

MAX_REPLIES = 16
MAX_TOP_LOGPROBS = 20  # vLLM's default for `max_logprobs`, and OpenAI's limit

_SAMPLING = (
    ParamSpec("temperature", "float", 0, 2, about="0 takes the most likely token"),
    ParamSpec("top_p", "float", 0, 1, about="share of probability to sample from; above 0"),
    ParamSpec("top_k", "int", -1, about="tokens to sample from; 0 or -1 is all of them"),
    ParamSpec("min_p", "float", 0, 1, about="least probability, relative to the likeliest token"),
    ParamSpec("max_tokens", "int", 1, about="tokens of the reply; default: what the context holds"),
    ParamSpec("min_tokens", "int", 0, about="tokens before the reply may end"),
    ParamSpec("stop", "list", about="strings that end the reply; they are not part of it"),
    ParamSpec("stop_token_ids", "list", about="tokens that end the reply"),
    ParamSpec("include_stop_str_in_output", "bool", about="they are part of it"),
    ParamSpec("ignore_eos", "bool", about="go on up to max_tokens"),
    ParamSpec("repetition_penalty", "float", 0.01, 10, about="over prompt and reply; 1 is none"),
    ParamSpec("presence_penalty", "float", -2, 2, about="for tokens that are in the reply"),
    ParamSpec("frequency_penalty", "float", -2, 2, about="for each time they are"),
    ParamSpec("logit_bias", "dict", about="token id -> what is added to its logit, -100 to 100"),
    ParamSpec("allowed_token_ids", "list", about="tokens to sample from, no others"),
    ParamSpec("bad_words", "list", about="words that do not come"),
    ParamSpec("skip_special_tokens", "bool", about="leave them out of the text; default: true"),
    ParamSpec("spaces_between_special_tokens", "bool", about="default: true"),
    ParamSpec("logprobs", "int", 0, MAX_TOP_LOGPROBS, about="how many of the likeliest to tell"),
    ParamSpec("seed", "int", 0, 2**53),
)
_OTHERS = (
    ParamSpec("n", "int", 1, MAX_REPLIES, about="replies; reply k has seed + k"),
    ParamSpec(
        "structured_outputs", "dict", about="one of json, json_object, regex, choice, grammar"
    ),
    ParamSpec("truncate_prompt_tokens", "int", 1, about="keep that many of the prompt's last"),
    ParamSpec("lora", "str", about="name of an adapter of the stage"),
    ParamSpec("tools", "list", about="functions that may be called, in OpenAI's form"),
    ParamSpec("tool_choice", "str", choices=("auto", "none"), about="default: auto"),
)
PARAMS = _SAMPLING + _OTHERS
_BY_NAME = {spec.name: spec for spec in PARAMS}
_OF_VLLM = {spec.name for spec in _SAMPLING}
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "list": (list, tuple, str),
    "dict": (dict,),
}
_GRAMMARS = ("json", "json_object", "regex", "choice", "grammar")


def check(params: dict[str, Any]) -> None:
    """Raises `BadRequest` for the first parameter that is unknown or out of its limits."""
    for name, value in params.items():
        if name not in _BY_NAME:
            raise BadRequest(
                f"there is no parameter '{name}'", param=name, hint=nearest(name, _BY_NAME)
            )
        if value is not None:
            _check_value(_BY_NAME[name], value)


def sampling_params(
    task: Task,
    defaults: dict[str, Any],
    room: int,
    *,
    rows: bool,
    index: int = 0,
    special_tokens: bool = False,
) -> Any:
    """vLLM's parameters for reply `index` of a task: its own over `defaults`, at most `room`
    tokens.

    `rows` says that hidden states are wanted: positions that the prefix cache answers are never
    computed, so it is not asked. Raises `BadRequest`.
    """
    given = {name: value for name, value in task.params.items() if value is not None}
    own = {name: value for name, value in given.items() if name in _OF_VLLM}
    merged: dict[str, Any] = {"max_tokens": room, **defaults, **own}
    merged["max_tokens"] = min(merged["max_tokens"], room)
    merged["min_tokens"] = min(merged.get("min_tokens", 0), merged["max_tokens"])
    merged["seed"] = _seed(merged.get("seed", task.values.get("seed")), index)
    if merged.get("temperature") == 0:
        merged["seed"] = None  # of no effect, and a generator of one's own costs time in each step
    if isinstance(merged.get("stop"), tuple):
        merged["stop"] = list(merged["stop"])
    if "logprobs" in task.emit:
        merged.setdefault("logprobs", 0)
    if special_tokens:
        merged["skip_special_tokens"] = False
    if "logit_bias" in merged:
        merged["logit_bias"] = _bias(merged["logit_bias"])
    try:
        return SamplingParams(
            **merged,
            structured_outputs=_structure(given.get("structured_outputs")),
            output_kind=RequestOutputKind.DELTA,
            detokenize="text" in task.emit or bool(merged.get("stop")),
            skip_reading_prefix_cache=rows or None,
        )
    except (VLLMClientError, TypeError, ValueError) as error:
        raise BadRequest(str(error), param=getattr(error, "parameter", None)) from error


def _seed(seed: int | None, index: int) -> int | None:
    return None if seed is None else seed + index


def _bias(given: dict[Any, Any]) -> dict[int, float]:
    """JSON's keys are strings."""
    try:
        bias = {int(token): float(value) for token, value in given.items()}
    except (TypeError, ValueError) as error:
        raise BadRequest(f"logit_bias: {error}", param="logit_bias") from error
    if not all(-100 <= value <= 100 for value in bias.values()):
        raise BadRequest("logit_bias must be between -100 and 100", param="logit_bias")
    return bias


def _structure(given: dict[str, Any] | None) -> Any:
    if not given:
        return None
    for name in given:
        if name not in _GRAMMARS:
            raise BadRequest(
                f"structured_outputs has no '{name}'",
                param=f"structured_outputs.{name}",
                hint=nearest(name, _GRAMMARS),
            )
    return StructuredOutputsParams(**given)


def _check_value(spec: ParamSpec, value: Any) -> None:
    if not _fits(spec.kind, value):
        raise BadRequest(f"{spec.name} must be of type {spec.kind}, not {value!r}", param=spec.name)
    low, high = spec.minimum, spec.maximum
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        limits = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise BadRequest(f"{spec.name} must be {limits}, not {value!r}", param=spec.name)
    if spec.choices and value not in spec.choices:
        raise BadRequest(
            f"{spec.name} cannot be {value!r}", param=spec.name, hint=nearest(value, spec.choices)
        )
    if spec.name == "top_p" and value == 0:
        raise BadRequest("top_p must be above 0", param="top_p")
    if spec.name in _LISTS:
        what, good = _LISTS[spec.name]
        if not all(good(one) for one in ([value] if isinstance(value, str) else value)):
            raise BadRequest(f"{spec.name} must be {what}", param=spec.name)


def _fits(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def _is_token(one: Any) -> bool:
    return type(one) is int and one >= 0


def _is_text(one: Any) -> bool:
    return isinstance(one, str) and bool(one)


def _is_tool(one: Any) -> bool:
    function = one.get("function") if isinstance(one, dict) else None
    return isinstance(function, dict) and _is_text(function.get("name"))


_LISTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "stop": ("strings that are not empty", _is_text),
    "bad_words": ("strings that are not empty", _is_text),
    "stop_token_ids": ("token ids", _is_token),
    "allowed_token_ids": ("token ids", _is_token),
    "tools": ("functions like {type: function, function: {name: ...}}", _is_tool),
}
