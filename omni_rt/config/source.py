"""YAML with places: plain values, and for every path the file and line it came from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from omni_rt.errors import ConfigError

Path = tuple[str | int, ...]

_MAX_DEPTH = 32  # an alias may contain itself
_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


class Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-3 is a number."""


Loader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))


class Dumper(yaml.SafeDumper):
    """What `Loader` reads, each value in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


Dumper.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))
Dumper.add_representer(str, Dumper.text)


@dataclass(slots=True)
class Source:
    """A parsed file. `places` knows where each key or item stands: "pipeline.yaml:3"."""

    value: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)

    def error(self, path: Path, what: str, hint: str | None = None) -> ConfigError:
        """An error with the place of `path` or, if that is not there, of what should hold it."""
        at = path
        while at and at not in self.places:
            at = at[:-1]
        return ConfigError(f"{self.places[at]}: {dotted(path)}: {what}", hint=hint)


def read(text: str, name: str) -> Source:
    """Raises `ConfigError` for broken YAML, a key that stands twice, and what is no mapping."""
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: this is not YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: this is not YAML: {error.reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}:1: this is nested too deeply") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{name}:1: a pipeline file is a mapping",
            hint="it has at least the keys 'stages' and 'outputs'",
        )
    source = Source()
    source.value = _mapping(node, (), name, source.places)
    return source


def dotted(path: Path) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).lstrip(".")


def _value(node: yaml.Node, path: Path, name: str, places: dict[Path, str]) -> Any:
    line = node.start_mark.line + 1
    places.setdefault(path, f"{name}:{line}")
    if len(path) > _MAX_DEPTH:
        raise ConfigError(f"{name}:{line}: {dotted(path[:4])}... is nested too deeply")
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, name, places)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, k), name, places) for k, item in enumerate(node.value)]
    try:
        return _scalar(node)
    except (yaml.YAMLError, ValueError) as error:  # an unknown tag, a day
        what = f"cannot read '{node.value}'"
        raise ConfigError(
            f"{name}:{line}: {dotted(path)}: {what}", hint="quote it if it is text"
        ) from error


def _scalar(node: yaml.Node) -> Any:
    value = Loader("").construct_object(node)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"{type(value).__name__} is no plain value")  # YAML also knows days and bytes


def _mapping(
    node: yaml.MappingNode, path: Path, name: str, places: dict[Path, str]
) -> dict[str, Any]:
    places.setdefault(path, f"{name}:{node.start_mark.line + 1}")
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value
        if not isinstance(key, str):
            raise ConfigError(f"{name}:{line}: a key must be a word")
        here = (*path, key)
        if key in mapping:
            first = places[here].rpartition(":")[2]
            raise ConfigError(f"{name}:{line}: {dotted(here)} stands twice (first in line {first})")
        places[here] = f"{name}:{line}"
        mapping[key] = _value(value_node, here, name, places)
    return mapping
