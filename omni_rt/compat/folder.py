"""From a model on disk to a pipeline: the stages are chosen by what its folder holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_rt.config import PipelineConfig, load_pipeline, parse_pipeline, presets
from omni_rt.errors import ConfigError

_FILES = (".yaml", ".yml")
_MODEL_ENGINE = re.compile(r"\bengine: *(?!echo\b|simulated\b)\w")


def pipeline_of(model: str) -> PipelineConfig:
    """What to serve for a pipeline file, a model folder, or the hub id of a preset's model.

    In this order: a pipeline file named, in the folder as pipeline.yaml, or beside it under the
    folder's name; the preset of the model's family; a folder of a diffusers pipeline or of a
    causal language model as the only stage. Raises `ConfigError`.
    """
    path = Path(model)
    if path.suffix in _FILES:
        return load_pipeline(path)
    if not path.is_dir():
        return _of_hub(model)
    path = path.resolve()
    for file in (path / "pipeline.yaml", *(path.with_name(path.name + end) for end in _FILES)):
        if file.is_file():
            return load_pipeline(file)
    return _of_folder(path)


def preset_of(family: str, names: Iterable[str]) -> str | None:
    """The preset for a `model_type` or a hub id: letters and digits say the same, at its begin."""
    plain = _letters(family.rpartition("/")[2])
    fitting = [name for name in names if plain.startswith(_letters(name))]
    return max(fitting, key=len, default=None)


def _families() -> list[str]:
    """The presets that are for models: not those of engines without one."""
    texts = {name: file.read_text(encoding="utf-8") for name, file in presets().items()}
    return [name for name, text in texts.items() if _MODEL_ENGINE.search(text)]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _of_folder(folder: Path) -> PipelineConfig:
    if (index := _read(folder / "model_index.json")) is not None:
        if "_class_name" not in index:
            raise ConfigError(f"{folder / 'model_index.json'} names no pipeline (_class_name)")
        painter = {"engine": "diffusers"}
        return _built(folder.name, folder, {"painter": painter}, {"image": "painter.image"})
    if (config := _read(folder / "config.json")) is not None:
        if preset := preset_of(str(config.get("model_type", "")), _families()):
            return _preset(preset, str(folder), folder.name)
        if not config.get("architectures"):
            raise ConfigError(f"{folder / 'config.json'} names no model class (architectures)")
        return _built(folder.name, folder, {"writer": {"engine": "vllm"}}, {"text": "writer.text"})
    raise ConfigError(
        f"{folder} holds no model that can be served as it is",
        hint="it needs pipeline.yaml (docs/config.md), model_index.json of diffusers or "
        "config.json of a language model",
    )


def _of_hub(model: str) -> PipelineConfig:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"there is no folder {model}")
    if preset := preset_of(model, _families()):
        return _preset(preset, model, model.rpartition("/")[2])
    raise ConfigError(
        f"there is no folder {model}, and no preset for a model of this name",
        hint="download it and give its folder, or write a pipeline file and give that",
    )


def _preset(preset: str, model: str, name: str) -> PipelineConfig:
    return _parsed({"preset": preset, "name": name, "model": model})


def _built(
    name: str, folder: Path, stages: Mapping[str, Any], outputs: Mapping[str, str]
) -> PipelineConfig:
    return _parsed({"name": name, "model": str(folder), "stages": stages, "outputs": outputs})


def _parsed(value: dict[str, Any]) -> PipelineConfig:
    return parse_pipeline(yaml.safe_dump(value), str(value["model"]))


def _read(file: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file. Raises `ConfigError`."""
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is no JSON object")
    return value
