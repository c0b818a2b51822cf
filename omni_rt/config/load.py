"""From a file to checked values. Every error names file, line, path and what would be right."""

from __future__ import annotations

import re
import typing
from pathlib import Path as FilePath
from typing import Any

import msgspec

from omni_rt.config.model import AR_ENGINES, ENGINES, EdgeConfig, PipelineConfig, StageConfig
from omni_rt.config.source import Path, Source, dotted, read
from omni_rt.errors import ConfigError, nearest

_PACKAGE = FilePath(__file__).parent.parent
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?$")
_AT = re.compile(r"(.*?)(?: - at `(key in )?\$(.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
_ARROW = re.compile(r"^\s*(\S+)\s*->\s*(\S+)\s*$")


def bundled() -> FilePath:
    """The pipeline file of the model that is shipped."""
    return _PACKAGE / "demo" / "shapes.yaml"


def presets() -> dict[str, FilePath]:
    """The shipped preset files by name."""
    return {path.stem: path for path in sorted((_PACKAGE / "presets").glob("*.yaml"))}


def load_pipeline(path: str | FilePath) -> PipelineConfig:
    """Read and check a pipeline file. Raises `ConfigError`."""
    file = FilePath(path)
    return parse_pipeline(read_text(file), str(path), file.parent)


def read_text(file: FilePath) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the pipeline file {file}: {reason}") from error


def parse_pipeline(text: str, source: str, base: FilePath | None = None) -> PipelineConfig:
    """The same from text; relative model folders are looked for in `base`."""
    return build(merged(text, source, base))


def merged(text: str, name: str, base: FilePath | None = None) -> list[Source]:
    """The file over its preset: sources, the strongest first, model folders made absolute."""
    own = read(text, name)
    sources = [own]
    preset = own.value.get("preset")
    if preset is not None:
        known = presets()
        if preset not in known:
            raise _error(own, ("preset",), f"there is no preset '{preset}'", nearest(preset, known))
        sources.append(read(read_text(known[preset]), f"preset {preset}"))
        _resolve(sources[1].value, known[preset].parent)
    _resolve(own.value, base)
    own.value.setdefault("name", FilePath(name).stem)
    return sources


def build(sources: list[Source]) -> PipelineConfig:
    value = _overlay(sources)
    _arrows(value, sources)
    _check_names(value, sources)
    try:
        config = msgspec.convert(value, PipelineConfig)
    except msgspec.ValidationError as error:
        raise _validation_error(error, value, sources) from error
    _check(config, sources)
    return config


def _overlay(sources: list[Source]) -> dict[str, Any]:
    """The preset's values, overridden by the file's: stages key by key, all else as a whole."""
    value: dict[str, Any] = {}
    for source in reversed(sources):
        for key, item in source.value.items():
            both = isinstance(item, dict) and isinstance(value.get(key), dict)
            value[key] = _stages(value[key], item) if key == "stages" and both else item
    return value


def _stages(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    stages = dict(below)
    for name, stage in above.items():
        old = stages.get(name)
        merge = isinstance(stage, dict) and isinstance(old, dict)
        stages[name] = {**dict(old or {}), **stage} if merge else stage
    return stages


def _resolve(value: dict[str, Any], base: FilePath | None) -> None:
    """Make model folders absolute that are written relative to the file."""
    stages = value.get("stages")
    holders = [value, *(stages.values() if isinstance(stages, dict) else ())]
    for holder in holders:
        model = holder.get("model") if isinstance(holder, dict) else None
        if isinstance(model, str) and base is not None:
            folder = base / model
            if model.startswith(".") or folder.is_dir():
                holder["model"] = str(folder.resolve())


def _arrows(value: dict[str, Any], sources: list[Source]) -> None:
    """Turn "a.x -> b.y" and `stream: true` into their long forms."""
    edges = value.get("edges")
    if not isinstance(edges, list):
        return
    for k, edge in enumerate(edges):
        if isinstance(edge, str):
            found = _ARROW.match(edge)
            if found is None:
                hint = "write an edge as 'stage.port -> stage.port'"
                raise _error(
                    _owner(sources, ("edges", k)), ("edges", k), f"'{edge}' is no edge", hint
                )
            edges[k] = {"from": found[1], "to": found[2]}
        elif isinstance(edge, dict) and isinstance(edge.get("stream"), bool):
            edge["stream"] = {} if edge["stream"] else None


def _check_names(value: dict[str, Any], sources: list[Source]) -> None:
    """Engines by name, before the types: a typing error there deserves the nearest name."""
    stages = value.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        engine = stage.get("engine") if isinstance(stage, dict) else None
        if isinstance(engine, str) and engine not in ENGINES and ":" not in engine:
            path = ("stages", name, "engine")
            hint = nearest(engine, ENGINES)
            raise _error(_owner(sources, path), path, f"there is no engine '{engine}'", hint)


def _validation_error(
    error: msgspec.ValidationError, value: dict[str, Any], sources: list[Source]
) -> ConfigError:
    """msgspec's error with the place it is about and, for an unknown key, the nearest one."""
    text = str(error)
    if found := _UNKNOWN.match(text):
        parent = _locate(found[2] or "", value, lambda part: _unknown_in(part, found[1]))
        path = (*parent, found[1])
        valid = _fields_at(parent)
        return _error(_owner(sources, path), path, "unknown key", nearest(found[1], valid))
    found = _AT.match(text)
    assert found is not None
    path = _locate(found[3] or "", value, lambda part: not _fits(parent_type(found[3] or ""), part))
    return _error(_owner(sources, path), path, _plain(found[1]), None)


def _locate(where: str, value: Any, suspect: Any) -> Path:
    """The path of msgspec's `$.stages[...].x`: `[...]` stands for the entry that is to blame."""
    path: Path = ()
    steps = list(_STEP.finditer(where))
    for at, step in enumerate(steps):
        if step[1] is not None:
            key: str | int = _RENAMED.get(step[1], step[1]) if path[:1] == ("edges",) else step[1]
        elif step[2] is not None:
            key = int(step[2])
        else:
            rest = where[step.end() :] if at + 1 < len(steps) else ""
            key = _culprit(value, rest, suspect)
        path = (*path, key)
        value = _child(value, key)
    return path


_RENAMED = {"source": "from", "target": "to"}


def _culprit(value: Any, rest: str, suspect: Any) -> str | int:
    """Which entry of a mapping is meant: the first whose part at `rest` is suspect."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    last: str | int = ""
    for key, entry in entries:
        last = key
        part = entry
        for step in _STEP.finditer(rest):
            part = _child(part, step[1] if step[1] is not None else int(step[2] or 0))
        if suspect(part):
            return key
    return last


def _child(value: Any, key: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return value[key]
    return None


def _unknown_in(part: Any, key: str) -> bool:
    return isinstance(part, dict) and key in part


def parent_type(where: str) -> Any:
    """The declared type at a path, for telling which entry of a mapping does not fit it."""
    declared: Any = PipelineConfig
    for step in _STEP.finditer(where):
        declared = _type_below(declared, step[1])
    return declared


def _type_below(declared: Any, field: str | None) -> Any:
    if declared is None:
        return None
    if field is None:
        args = [a for a in getattr(declared, "__args__", ()) if a is not Ellipsis]
        return args[-1] if args else None
    for info in _structs(declared):
        for item in msgspec.structs.fields(info):
            if field in (item.name, item.encode_name):
                return item.type
    return None


def _structs(declared: Any) -> list[Any]:
    options = getattr(declared, "__args__", ()) or (declared,)
    return [o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)]


def _fits(declared: Any, part: Any) -> bool:
    try:
        msgspec.convert(part, Any if declared is None else declared)
    except msgspec.ValidationError:
        return False
    return declared is not None


def _fields_at(path: Path) -> list[str]:
    declared: Any = PipelineConfig
    for part in path:
        field = None if typing.get_origin(declared) in (dict, tuple) else str(part)
        declared = _type_below(declared, field)
    return [f.encode_name for s in _structs(declared) for f in msgspec.structs.fields(s)]


def _check(config: PipelineConfig, sources: list[Source]) -> None:
    """What types cannot say about stages, edges and outputs."""
    if not config.stages:
        raise _error(_owner(sources, ("stages",)), ("stages",), "there is no stage", None)
    if not config.outputs:
        raise _error(_owner(sources, ("outputs",)), ("outputs",), "there is no output", None)
    for name, stage in config.stages.items():
        _check_stage(config, name, stage, sources)
    for k, edge in enumerate(config.edges):
        _check_edge(config, edge, ("edges", k), sources)
    for name, port in config.outputs.items():
        _check_end(config, port, ("outputs", name), sources)


def _check_stage(
    config: PipelineConfig, name: str, stage: StageConfig, sources: list[Source]
) -> None:
    def wrong(key: str, what: str, hint: str | None = None) -> ConfigError:
        path = ("stages", name, key)
        return _error(_owner(sources, path), path, what, hint)

    for engine in ENGINES:
        if engine != stage.engine and getattr(stage, engine):
            hint = f"its options belong under '{stage.engine}'"
            raise wrong(engine, f"stage {name} has the engine {stage.engine}", hint)
    if stage.options and ":" not in stage.engine:
        raise wrong("options", f"stage {name} has the engine {stage.engine}", "use that key")
    for key in ("hidden", "facts"):
        if getattr(stage, key) and stage.engine not in AR_ENGINES:
            raise wrong(key, f"only language models have '{key}', not {stage.engine}")
    if stage.steps is not None and stage.engine != "diffusers":
        raise wrong("steps", f"only diffusers stages have 'steps', not {stage.engine}")
    if stage.engine in ("vllm", "diffusers") and not (stage.model or config.model):
        raise wrong("engine", f"stage {name} has no model", "name it under 'model'")
    if stage.worker is not None:
        _check_shared(config, name, stage, wrong)


def _check_shared(config: PipelineConfig, name: str, stage: StageConfig, wrong: Any) -> None:
    """Stages that share a process: one vLLM engine at most, alike in replicas."""
    others = [
        (n, s) for n, s in config.stages.items() if n != name and (s.worker or n) == stage.worker
    ]
    for other, config_of in others:
        if stage.engine == config_of.engine == "vllm":
            raise wrong("worker", f"a process holds one vLLM engine; {other} has one as well")
        if stage.replicas != config_of.replicas:
            raise wrong("replicas", f"{name} and {other} share a process and so their replicas")


def _check_edge(
    config: PipelineConfig, edge: EdgeConfig, path: Path, sources: list[Source]
) -> None:
    source = _check_end(config, edge.source, path, sources)
    _check_end(config, edge.target, path, sources)
    if edge.when is None:
        return
    fact = edge.when.removeprefix("not ")
    if edge.stream is not None:
        what = "an edge with a condition cannot stream: facts are known at the producer's end"
        raise _error(_owner(sources, path), path, what, None)
    if source.engine in AR_ENGINES and fact not in source.facts:
        what = f"stage {edge.source.split('.')[0]} reports no fact '{fact}'"
        hint = f"declare it under its 'facts'; {nearest(fact, source.facts)}"
        raise _error(_owner(sources, path), (*path, "when"), what, hint)


def _check_end(config: PipelineConfig, port: str, path: Path, sources: list[Source]) -> StageConfig:
    stage = port.split(".")[0]
    if stage not in config.stages:
        hint = nearest(stage, config.stages)
        raise _error(_owner(sources, path), path, f"there is no stage '{stage}'", hint)
    return config.stages[stage]


def _owner(sources: list[Source], path: Path) -> Source:
    """The source that a path came from: the strongest that has it, or its nearest parent."""
    while path:
        for source in sources:
            if path in source.lines:
                return source
        path = path[:-1]
    return sources[0]


def _error(source: Source, path: Path, what: str, hint: str | None) -> ConfigError:
    return ConfigError(f"{source.where(path)}: {dotted(path)}: {what}", hint=hint)


def _plain(message: str) -> str:
    return message.replace("Object missing required field", "missing key")
