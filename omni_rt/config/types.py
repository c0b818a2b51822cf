"""Does a plain value fit a declared type? The first part that does not is named by its path."""

from __future__ import annotations

import math
import types
import typing
from typing import Any

import msgspec

from omni_rt.config.source import Path, Source
from omni_rt.errors import nearest

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_WORDS_OF_VALUES = {type(None): "nothing", dict: "a mapping", list: "a list"}


def check_types(source: Source, value: Any, declared: Any, path: Path = ()) -> None:
    """Walk a value along its type (structs, mappings, tuples, scalars). Raises `ConfigError`."""
    declared, optional = _without_none(declared)
    if value is None and optional:
        return
    if isinstance(declared, type) and issubclass(declared, msgspec.Struct):
        _check_struct(source, _expect(dict, source, value, path), declared, path)
    elif typing.get_origin(declared) is dict:
        key_type, item_type = typing.get_args(declared)
        for key, item in _expect(dict, source, value, path).items():
            _check_scalar(source, key, key_type, (*path, key))
            check_types(source, item, item_type, (*path, key))
    elif declared is Any and isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_types(source, item, Any, (*path, key))
    elif typing.get_origin(declared) is tuple:
        for k, item in enumerate(_expect(list, source, value, path)):
            check_types(source, item, typing.get_args(declared)[0], (*path, k))
    else:
        _check_scalar(source, value, declared, path)


def _check_struct(source: Source, value: dict[str, Any], declared: Any, path: Path) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(declared)}
    for key in value:
        if key not in fields:
            raise source.error((*path, key), "unknown key", nearest(key, fields))
    for key, field in fields.items():
        if key in value:
            check_types(source, value[key], field.type, (*path, key))
        elif field.required:
            raise source.error((*path, key), "this key is missing")


def _check_scalar(source: Source, value: Any, declared: Any, path: Path) -> None:
    try:
        msgspec.convert(value, declared)
        fits = not isinstance(value, float) or math.isfinite(value)
    except msgspec.ValidationError:
        fits = False
    if not fits:
        raise source.error(path, f"expected {_expected(declared)}, got {_shown(value)}")


def _expect(kind: type, source: Source, value: Any, path: Path) -> Any:
    if not isinstance(value, kind):
        words = _WORDS_OF_VALUES[kind]
        raise source.error(path, f"expected {words}, got {_shown(value)}")
    return value


def _without_none(declared: Any) -> tuple[Any, bool]:
    """`X` and True of `X | None`; the type itself and False of any other."""
    if typing.get_origin(declared) not in (typing.Union, types.UnionType):
        return declared, False
    (rest,) = (arg for arg in typing.get_args(declared) if arg is not types.NoneType)
    return rest, True


def _expected(declared: Any) -> str:
    """The type in words: its own description, the choices, or the plain type's."""
    for meta in getattr(declared, "__metadata__", ()):
        if meta.description:
            return str(meta.description)
    if typing.get_origin(declared) is typing.Literal:
        return f"one of {', '.join(typing.get_args(declared))}"
    return _WORDS.get(declared, "a finite number")  # `Any` refuses nothing else


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _WORDS_OF_VALUES.get(type(value)) or (
        repr(value) if isinstance(value, str) else str(value)
    )
