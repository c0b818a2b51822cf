"""From a file to checked values. Every error names file, line, path and what would be right."""

from __future__ import annotations

import os.path
import re
from pathlib import Path as FilePath
from typing import Any

import msgspec

from omni_rt.config.check import check_folders, check_pipeline
from omni_rt.config.model import ENGINES, PipelineConfig
from omni_rt.config.source import Path, Source, read
from omni_rt.config.types import check_types
from omni_rt.errors import ConfigError, nearest

_PACKAGE = FilePath(__file__).parent.parent
_ARROW = re.compile(r"\s*(\S+?)\s*->\s*(\S+)\s*")


def bundled() -> FilePath:
    """The pipeline file of the model that is shipped."""
    return _PACKAGE / "demo" / "shapes.yaml"


def presets() -> dict[str, FilePath]:
    """The shipped preset files by name."""
    return {path.stem: path for path in sorted((_PACKAGE / "presets").glob("*.yaml"))}


def load_pipeline(path: str | FilePath) -> PipelineConfig:
    """Read and check a pipeline file and that its model folders exist. Raises `ConfigError`."""
    return load(path)[0]


def load(path: str | FilePath) -> tuple[PipelineConfig, Source]:
    """The same, with where each value came from."""
    file = FilePath(path)
    source = merged(_text(file), str(path), file.parent)
    config = build(source)
    check_folders(config, source)
    return config, source


def parse_pipeline(text: str, source: str, base: FilePath | None = None) -> PipelineConfig:
    """The same from text. Model folders are relative to `base`; that they exist is not checked."""
    return build(merged(text, source, base))


def merged(text: str, name: str, base: FilePath | None = None) -> Source:
    """The file over its preset, with model folders absolute."""
    source = read(text, name)
    _resolve(source.value, base)
    preset = source.value.get("preset")
    if isinstance(preset, str):
        source = _over(source, _read_preset(preset, source))
    if "name" not in source.value:
        source.value["name"] = FilePath(name).stem
        source.places["name",] = "the file's name"
    return source


def build(source: Source) -> PipelineConfig:
    """Raises `ConfigError` for the first thing that is wrong."""
    _expand(source)
    _check_engines(source)
    check_types(source, source.value, PipelineConfig)
    config = msgspec.convert(source.value, PipelineConfig)
    check_pipeline(config, source)
    return config


def _text(file: FilePath) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the pipeline file {file}: {reason}") from error


def _read_preset(preset: str, source: Source) -> Source:
    known = presets()
    if preset not in known:
        what = f"there is no preset '{preset}'"
        raise source.error(("preset",), what, nearest(preset, known))
    below = read(_text(known[preset]), f"preset {preset}")
    _resolve(below.value, known[preset].parent)
    return below


def _over(above: Source, below: Source) -> Source:
    """The file over its preset: mappings under `stages` key by key, all else as a whole."""
    replaced: list[Path] = []

    def merge(old: Any, new: Any, path: Path) -> Any:
        if _merges(old, new, path):
            both = {k: merge(old[k], v, (*path, k)) for k, v in new.items() if k in old}
            return {**old, **new, **both}
        replaced.append(path)
        return new

    value = merge(below.value, above.value, ())
    kept = {
        path: place
        for path, place in below.places.items()
        if not any(path[: len(gone)] == gone for gone in replaced)
    }
    return Source(value, kept | above.places)


def _merges(old: Any, new: Any, path: Path) -> bool:
    """A stage that gets another engine is another stage: nothing of the old one is kept."""
    if not (isinstance(old, dict) and isinstance(new, dict)) or path[:1] not in ((), ("stages",)):
        return False
    return len(path) != 2 or new.get("engine") in (None, old.get("engine"))


def _resolve(value: dict[str, Any], base: FilePath | None) -> None:
    """Make folders of models and adapters absolute that are written relative to the file."""
    stages = value.get("stages")
    holders = [value, *(stages.values() if isinstance(stages, dict) else ())]
    for holder in holders:
        adapters = holder.get("lora") if isinstance(holder, dict) else None
        if isinstance(adapters, dict) and base is not None:
            for name, folder in adapters.items():
                if isinstance(folder, str):
                    adapters[name] = os.path.realpath(
                        os.path.join(base, os.path.expanduser(folder))
                    )
        model = holder.get("model") if isinstance(holder, dict) else None
        if isinstance(model, str) and model and base is not None:
            # Of os.path: a name that cannot be a folder's is an answer there, not an exception.
            folder = os.path.join(base, os.path.expanduser(model))
            if model.startswith((".", "/", "~")) or os.path.isdir(folder):
                holder["model"] = os.path.realpath(folder)


def _expand(source: Source) -> None:
    """Turn "a.x -> b.y" and `stream: true` into their long forms."""
    edges = source.value.get("edges")
    if not isinstance(edges, list):
        return
    for k, edge in enumerate(edges):
        if isinstance(edge, str):
            found = _ARROW.fullmatch(edge)
            if found is None:
                hint = "write an edge as 'stage.port -> stage.port'"
                raise source.error(("edges", k), f"'{edge}' is no edge", hint)
            edges[k] = {"from": found[1], "to": found[2]}
        elif isinstance(edge, dict) and isinstance(edge.get("stream"), bool):
            edge["stream"] = {} if edge["stream"] else None


def _check_engines(source: Source) -> None:
    """Before the types: a typing error in an engine's name deserves the nearest name."""
    stages = source.value.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        engine = stage.get("engine") if isinstance(stage, dict) else None
        if isinstance(engine, str) and engine not in ENGINES and ":" not in engine:
            hint = f"{nearest(engine, ENGINES)}, or one of your own as module:function"
            raise source.error(("stages", name, "engine"), f"there is no engine '{engine}'", hint)
