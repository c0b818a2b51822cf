"""The full effective form of a pipeline, with where each value came from, and the JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import msgspec
import yaml

from omni_rt.config.load import load
from omni_rt.config.model import PORT, PipelineConfig
from omni_rt.config.source import Dumper, Path, Source


def effective(path: str | FilePath) -> str:
    """The file as it takes effect: every key written out, its origin behind it as a comment.

    The text is a pipeline file again. Raises `ConfigError`.
    """
    config, source = load(path)
    value: dict[str, Any] = msgspec.to_builtins(config)
    value.pop("preset")  # its values are written out
    return "\n".join(_lines(value, (), source)) + "\n"


def _lines(value: dict[str, Any], path: Path, source: Source) -> Iterator[str]:
    indent = "  " * len(path)
    for key, item in value.items():
        here = (*path, key)
        if isinstance(item, dict) and item:
            yield f"{indent}{_yaml(key)}:"
            yield from _lines(item, here, source)
        elif here == ("edges",) and item:
            yield f"{indent}edges:"
            for k, edge in enumerate(item):
                yield f"{indent}  - {_yaml(edge)}  # {_origin((*here, k), source)}"
        else:
            yield f"{indent}{_yaml(key)}: {_yaml(item)}  # {_origin(here, source)}"


def _yaml(value: Any) -> str:
    """A value in one line."""
    text = yaml.dump(
        value,
        Dumper=Dumper,
        default_flow_style=True,
        width=10**9,
        allow_unicode=True,
        sort_keys=False,
    )
    return str(text).removesuffix("\n").removesuffix("\n...")


def _origin(path: Path, source: Source) -> str:
    return source.places.get(path, "default")


def schema() -> dict[str, Any]:
    """The JSON schema of a pipeline file, for editors. Edges may be written as strings."""
    full = msgspec.json.schema(PipelineConfig)
    edge = full["$defs"]["EdgeConfig"]
    arrow = {"type": "string", "pattern": rf"^\s*{PORT}\s*->\s*{PORT}\s*$"}
    full["$defs"]["EdgeConfig"] = {"anyOf": [arrow, edge]}
    stream = edge["properties"]["stream"]
    stream["anyOf"] = [{"type": "boolean"}, *stream["anyOf"]]
    # A file with a preset may leave out what the preset says.
    pipeline = full["$defs"]["PipelineConfig"]
    required = pipeline.pop("required")
    pipeline["anyOf"] = [{"required": ["preset"]}, {"required": required}]
    full["$defs"]["StageConfig"].pop("required")
    return full
