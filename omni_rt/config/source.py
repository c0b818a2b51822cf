"""YAML with places: plain values, and for every path the file and line it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from omni_rt.errors import ConfigError

Path = tuple[str | int, ...]


@dataclass(slots=True)
class Source:
    """A parsed file. `lines` knows where each key or item stands."""

    name: str
    value: dict[str, Any]
    lines: dict[Path, int] = field(default_factory=dict)

    def where(self, path: Path) -> str:
        """`file:line` of the nearest enclosing place that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}:{self.lines.get(path, 1)}"


def read(text: str, name: str) -> Source:
    """Raises `ConfigError` for broken YAML, a key that stands twice, and what is no mapping."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: this is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}:1: this is not YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{name}:1: a pipeline file is a mapping",
            hint="it has at least the keys 'stages' and 'outputs'",
        )
    source = Source(name, {})
    value = _value(node, (), source)
    assert isinstance(value, dict)
    source.value = value
    return source


def dotted(path: Path) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).lstrip(".")


def _value(node: yaml.Node, path: Path, source: Source) -> Any:
    source.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, source)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, k), source) for k, item in enumerate(node.value)]
    return yaml.SafeLoader("").construct_object(node)


def _mapping(node: yaml.MappingNode, path: Path, source: Source) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key, str):
            raise ConfigError(f"{source.name}:{line}: a key must be a word")
        if key in mapping:
            where = dotted((*path, key))
            first = source.lines[*path, key]
            raise ConfigError(f"{source.name}:{line}: {where} stands twice (first in line {first})")
        source.lines[*path, key] = line
        mapping[key] = _value(value_node, (*path, key), source)
    return mapping
