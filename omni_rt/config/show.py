"""The full effective form of a pipeline, with where each value came from, and the JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import msgspec
import yaml

from omni_rt.config.load import build, merged, read_text
from omni_rt.config.model import PipelineConfig
from omni_rt.config.source import Path, Source


def effective(path: str | FilePath) -> str:
    """The file as it takes effect: every key written out, its origin behind it as a comment."""
    file = FilePath(path)
    sources = merged(read_text(file), str(path), file.parent)
    value: dict[str, Any] = msgspec.to_builtins(build(sources))
    value.pop("preset")  # its values are written out
    return "\n".join(_lines(value, (), sources, 0)) + "\n"


def _lines(value: dict[str, Any], path: Path, sources: list[Source], depth: int) -> Iterator[str]:
    for key, item in value.items():
        here = (*path, key)
        if isinstance(item, dict) and item:
            yield f"{'  ' * depth}{key}:"
            yield from _lines(item, here, sources, depth + 1)
        else:
            text = yaml.safe_dump(item, default_flow_style=True, width=10**6, allow_unicode=True)
            plain = text.removesuffix("\n").removesuffix("\n...").strip()
            yield f"{'  ' * depth}{key}: {plain}  # {_origin(here, sources)}"


def _origin(path: Path, sources: list[Source]) -> str:
    for source in sources:
        if path in source.lines:
            return source.where(path)
    return "default" if path != ("name",) else "the file's name"


def schema() -> dict[str, Any]:
    """The JSON schema of a pipeline file, for editors. Edges may be written as strings."""
    full = msgspec.json.schema(PipelineConfig)
    edge = full["$defs"]["EdgeConfig"]
    port = r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*"
    arrow = {"type": "string", "pattern": rf"^\s*{port}\s*->\s*{port}\s*$"}
    full["$defs"]["EdgeConfig"] = {"anyOf": [arrow, edge]}
    stream = edge["properties"]["stream"]
    stream["anyOf"] = [{"type": "boolean"}, *stream.get("anyOf", [])]
    # A file with a preset may leave out what the preset says.
    pipeline = full["$defs"]["PipelineConfig"]
    required = pipeline.pop("required")
    pipeline["anyOf"] = [{"required": ["preset"]}, {"required": required}]
    stage = full["$defs"]["StageConfig"]
    stage.pop("required", None)
    return full
