"""Request parameters and what vLLM makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from omni_rt.errors import BadRequest, nearest
from omni_rt.wire.messages import ParamSpec

if TYPE_CHECKING:
    from omni_rt_workers.engine import Task

PARAMS = (
    ParamSpec("temperature", "float", 0, 2, about="0 takes the most likely token"),
    ParamSpec("top_p", "float", 0, 1, about="share of probability to sample from; above 0"),
    ParamSpec("top_k", "int", -1, about="tokens to sample from; 0 or -1 is all of them"),
    ParamSpec("min_p", "float", 0, 1, about="least probability, relative to the likeliest token"),
    ParamSpec("max_tokens", "int", 1, about="tokens of the reply; default: what the context holds"),
    ParamSpec("min_tokens", "int", 0, about="tokens before the reply may end"),
    ParamSpec("stop", "list", about="strings that end the reply; they are not part of it"),
    ParamSpec("repetition_penalty", "float", 0.01, 10, about="over prompt and reply; 1 is none"),
    ParamSpec("presence_penalty", "float", -2, 2, about="for tokens that are in the reply"),
    ParamSpec("frequency_penalty", "float", -2, 2, about="for each time they are"),
    ParamSpec("seed", "int", 0, 2**53),
    ParamSpec("ignore_eos", "bool", about="go on up to max_tokens"),
)
_BY_NAME = {spec.name: spec for spec in PARAMS}
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list, tuple, str),
}


def check(params: dict[str, Any]) -> None:
    """Raises `BadRequest` for the first parameter that is unknown or out of its limits."""
    for name, value in params.items():
        if name not in _BY_NAME:
            raise BadRequest(
                f"there is no parameter '{name}'", param=name, hint=nearest(name, _BY_NAME)
            )
        if value is not None:
            _check_value(_BY_NAME[name], value)


def sampling_params(task: Task, defaults: dict[str, Any], room: int, *, rows: bool) -> Any:
    """vLLM's parameters for a task: its own over `defaults`, at most `room` tokens.

    `rows` says that hidden states are wanted: positions that the prefix cache answers are never
    computed, so it is not asked.
    """
    check(task.params)
    given = {name: value for name, value in task.params.items() if value is not None}
    merged: dict[str, Any] = {"max_tokens": room, **defaults, **given}
    merged["max_tokens"] = min(merged["max_tokens"], room)
    merged["min_tokens"] = min(merged.get("min_tokens", 0), merged["max_tokens"])
    merged.setdefault("seed", task.values.get("seed"))
    if not isinstance(merged.get("stop", ""), str):
        merged["stop"] = list(merged["stop"])
    if merged.get("temperature") == 0:
        merged["seed"] = None  # of no effect, and a generator of one's own costs time in each step
    return SamplingParams(
        **merged,
        output_kind=RequestOutputKind.DELTA,
        detokenize="text" in task.emit or bool(merged.get("stop")),
        skip_reading_prefix_cache=rows or None,
    )


def _check_value(spec: ParamSpec, value: Any) -> None:
    if not _fits(spec.kind, value):
        raise BadRequest(f"{spec.name} must be of type {spec.kind}, not {value!r}", param=spec.name)
    low, high = spec.minimum, spec.maximum
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        limits = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise BadRequest(f"{spec.name} must be {limits}, not {value!r}", param=spec.name)
    if spec.name == "top_p" and value == 0:
        raise BadRequest("top_p must be above 0", param="top_p")
    if spec.name == "stop":
        _check_stop([value] if isinstance(value, str) else value)


def _fits(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def _check_stop(strings: list[Any] | tuple[Any, ...]) -> None:
    if not all(isinstance(one, str) and one for one in strings):
        raise BadRequest("stop must be strings that are not empty", param="stop")
