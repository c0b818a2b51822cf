"""Joining calls of one module: which fit, how arguments become one batch, how results are split.

A call has *rows*: the length of its first argument, a tensor's first axis or a list of tensors
("ragged"; the model pads and masks by itself). Every other argument either follows the rows, or is
shared and must then be the same in all joined calls. When in doubt a call runs alone.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from omni_rt_workers.engines.diffusers_dit.fibre import Call

# Arguments without a batch axis, whose first axis may equal the rows by accident.
SHARED = frozenset({"img_ids", "txt_ids", "image_rotary_emb", "rotary_emb", "freqs_cis"})
# Scalar tensors that a model takes for all rows alike and also one for each row.
PER_ROW_SCALARS = frozenset({"timestep", "timesteps", "t", "sample_timestep"})
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Unjoinable(Exception):
    """Raised when a call cannot be joined with others, or a joined result cannot be split."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A call's arguments by name, and what it has in common with calls that it can be joined to."""

    rows: int
    ragged: bool
    arguments: dict[str, Any]
    structure: Hashable  # kinds and dtypes: calls alike in this are joined in the same way
    key: Hashable  # structure, sizes and shared values: calls equal in this are joined


class Digests:
    """Digests of tensor contents, each computed once as long as the tensor lives unchanged."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, bytes]] = {}

    def of(self, tensor: torch.Tensor) -> bytes:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        digest = _digest(tensor)
        key = id(tensor)
        ref = weakref.ref(tensor, lambda _: self._forget(key))
        self._known[key] = (ref, tensor._version, digest)
        return digest

    def _forget(self, key: int) -> None:
        self._known.pop(key, None)


def _digest(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=16).digest()


def layout(call: Call, digests: Digests) -> Layout:
    """How `call` can be joined. Raises `Unjoinable`."""
    arguments = _by_name(call)
    first = next(iter(arguments.values()), None)
    rows, ragged = _rows(first)
    kinds: list[Hashable] = [call.component, id(call.function), call.context, ragged]
    sizes: list[Hashable] = []
    for name, value in arguments.items():
        kind, size = _describe(name, value, rows, ragged, digests)
        kinds.append((name, kind))
        sizes.append(size)
    structure = tuple(kinds)
    return Layout(rows, ragged, arguments, structure, (structure, tuple(sizes)))


def join(layouts: Sequence[Layout]) -> dict[str, Any]:
    """The keyword arguments of one call with the rows of all, in order. Their keys are equal."""
    return {
        name: _join(name, [one.arguments[name] for one in layouts], layouts)
        for name in layouts[0].arguments
    }


def split(result: Any, layouts: Sequence[Layout]) -> list[Any]:
    """What each of the joined calls would have returned. Raises `Unjoinable`."""
    return _split(result, [one.rows for one in layouts], layouts[0].ragged)


def _by_name(call: Call) -> dict[str, Any]:
    bound = call.signature.bind(*call.args, **call.kwargs)
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = call.signature.parameters[name].kind
        if kind is kind.VAR_KEYWORD:
            arguments.update(value)
        elif kind in (kind.VAR_POSITIONAL, kind.POSITIONAL_ONLY):
            raise Unjoinable(f"argument '{name}' cannot be given by name")
        else:
            arguments[name] = value
    return arguments


def _rows(first: Any) -> tuple[int, bool]:
    if isinstance(first, torch.Tensor) and first.ndim:
        return first.shape[0], False
    if _is_tensor_list(first):
        return len(first), True
    raise Unjoinable("the first argument has no rows")


def _is_tensor_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, torch.Tensor) for one in value)
    )


def _role(name: str, value: Any, rows: int, ragged: bool) -> str:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0 and name in PER_ROW_SCALARS:
            return "scalar"
        if value.ndim and value.shape[0] == rows and name not in SHARED:
            return "rows"
        return "shared"
    if ragged and _is_tensor_list(value) and len(value) == rows:
        return "ragged"
    if isinstance(value, list | tuple):
        return "items"
    if isinstance(value, Mapping):
        return "fields"
    if isinstance(value, _CONSTANTS):
        return "constant"
    raise Unjoinable(f"argument '{name}' is a {type(value).__name__}")


def _describe(
    name: str, value: Any, rows: int, ragged: bool, digests: Digests
) -> tuple[Hashable, Hashable]:
    """(kind, size): what must be alike to be joined in one way, and to be joined at all."""
    role = _role(name, value, rows, ragged)
    if role == "constant":
        return (role, type(value)), value
    if role in ("items", "fields"):
        parts = value.items() if role == "fields" else enumerate(value)
        described = [
            (key, _describe(name if role == "items" else str(key), part, rows, ragged, digests))
            for key, part in parts
        ]
        return (
            (role, type(value), tuple((key, kind) for key, (kind, _) in described)),
            tuple(size for _, (_, size) in described),
        )
    if role == "ragged":
        # Text may differ in length; pictures may not: the smaller would pay for the larger.
        alike = {(one.dtype, one.device, one.ndim) for one in value}
        sizes = {tuple(one.shape) if one.ndim > 2 else tuple(one.shape[1:]) for one in value}
        if len(alike) > 1 or len(sizes) > 1:
            raise Unjoinable(f"the rows of '{name}' differ among themselves")
        return (role, alike.pop()), sizes.pop()
    kind = (role, value.dtype, value.device, value.ndim)
    if role == "shared":
        return kind, (tuple(value.shape), digests.of(value))
    return kind, tuple(value.shape[1:])


def _join(name: str, values: list[Any], layouts: Sequence[Layout]) -> Any:
    role = _role(name, values[0], layouts[0].rows, layouts[0].ragged)
    if role == "rows":
        return torch.cat(values)
    if role == "scalar":
        return torch.cat([v.expand(one.rows) for v, one in zip(values, layouts, strict=True)])
    if role == "ragged":
        return [row for value in values for row in value]
    if role == "items":
        parts = [_join(name, list(part), layouts) for part in zip(*values, strict=True)]
        return type(values[0])(parts)
    if role == "fields":
        return {key: _join(str(key), [v[key] for v in values], layouts) for key in values[0]}
    return values[0]


def _split(result: Any, rows: list[int], ragged: bool) -> list[Any]:
    if isinstance(result, torch.Tensor):
        if not result.ndim or result.shape[0] != sum(rows):
            raise Unjoinable(f"a result of shape {tuple(result.shape)} has no {sum(rows)} rows")
        return list(torch.split(result, rows))
    if ragged and _is_tensor_list(result) and len(result) == sum(rows):
        items = iter(result)
        return [[next(items) for _ in range(count)] for count in rows]
    if type(result) in (list, tuple):
        parts = [_split(part, rows, ragged) for part in result]
        return [type(result)(part[i] for part in parts) for i in range(len(rows))]
    if isinstance(result, Mapping):
        fields = {key: _split(part, rows, ragged) for key, part in result.items()}
        return [
            type(result)(**{key: part[i] for key, part in fields.items()}) for i in range(len(rows))
        ]
    if result is None:
        return [None] * len(rows)
    raise Unjoinable(f"a {type(result).__name__} cannot be split")
