"""From a list of stage configurations to a pipeline: the same graph as that of a file, a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omni_rt.compat.described import ENGINES, described, engine_of
from omni_rt.compat.stages import OmniStageConfig
from omni_rt.config import PipelineConfig
from omni_rt.config.check import check_folders
from omni_rt.config.load import build, merged
from omni_rt.errors import ConfigError, nearest

_ALIASES = {
    "hidden_states": "hidden",
    "embeddings": "hidden",
    "prompt_embeds": "hidden",
    "latent": "latents",
}
# Ports by modality. An engine of one's own has the ports of its type, and further ones that are
# called what their modalities are.
_INPUTS: dict[str, dict[str, str]] = {
    "AR": {},
    "DiT": {"text": "prompt", "hidden": "prompt_embeds", "image": "image", "latents": "latents"},
}
_OUTPUTS: dict[str, dict[str, str]] = {
    "AR": {"text": "text", "hidden": "hidden", "logprobs": "logprobs"},
    "DiT": {"image": "image", "latents": "latents"},
}


@dataclass(frozen=True, slots=True)
class Chain:
    """A pipeline with a list of outputs for each stage, and for the result."""

    config: PipelineConfig
    names: tuple[str, ...]  # of the stages, in order
    shown: tuple[tuple[str, ...], ...]  # outputs of each stage
    result: tuple[str, ...]  # outputs that make the result


def chain(stages: Sequence[OmniStageConfig]) -> Chain:
    """Raises `ConfigError` for stages that do not go together."""
    if not stages:
        raise ConfigError("there is no stage", hint="give a list of OmniStageConfig")
    for stage in stages:
        _check_type(stage)
    names = tuple(f"stage_{stage.stage_id}" for stage in stages)
    if len(set(names)) < len(names):
        raise ConfigError(f"stage_id must differ: {[stage.stage_id for stage in stages]}")
    edges = [
        f"{names[k]}.{source} -> {names[k + 1]}.{target}"
        for k in range(len(stages) - 1)
        for source, target in _joined(stages[k], stages[k + 1])
    ]
    shown = [
        [f"{names[k]}.{port}" for port in _shown(stage, names[k], edges)]
        for k, stage in enumerate(stages)
    ]
    result = _result(stages, names, shown)
    value = {
        "name": "omni",
        "stages": {name: described(stage) for name, stage in zip(names, stages, strict=True)},
        "edges": edges,
        "outputs": {_name(port): port for ports in (*shown, result) for port in ports},
    }
    return Chain(
        _config(value),
        names,
        tuple(tuple(map(_name, ports)) for ports in shown),
        tuple(map(_name, result)),
    )


def _config(value: dict[str, Any]) -> PipelineConfig:
    try:
        text = yaml.safe_dump(value, sort_keys=False)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"stage_configs: only plain values can be told to a stage: {error}"
        ) from (error)
    source = merged(text, "stage_configs", Path.cwd())
    config = build(source)
    check_folders(config, source)
    return config


def _name(port: str) -> str:
    return port.replace(".", "_")


# ---- ports


def _joined(before: OmniStageConfig, after: OmniStageConfig) -> list[tuple[str, str]]:
    """Output and input port of everything that both stages name."""
    if after.engine_type == "AR":
        raise ConfigError(
            f"stage {after.stage_id}: an AR stage takes the request itself and must come first"
        )
    given = {_plain(modality) for modality in before.output_modalities}
    pairs = [
        (_port(before, modality, _OUTPUTS), _port(after, modality, _INPUTS))
        for modality in map(_plain, after.input_modalities)
        if modality in given
    ]
    if not pairs:
        raise ConfigError(
            f"stage {after.stage_id} takes {after.input_modalities}, and stage "
            f"{before.stage_id} gives {before.output_modalities}",
            hint="they need a modality in common",
        )
    return pairs


def _shown(stage: OmniStageConfig, name: str, edges: list[str]) -> list[str]:
    """Its ports that are outputs of the pipeline. A picture that goes on into another stage does
    so as a tensor and cannot be encoded as well; its latents can be had."""
    own = [m for m in map(_plain, stage.output_modalities) if _has(stage, m)]
    ports = [_port(stage, modality, _OUTPUTS) for modality in own]
    if any(edge.startswith(f"{name}.image ") for edge in edges):
        ports = ["latents" if port == "image" else port for port in ports]
    return list(dict.fromkeys(ports))


def _result(
    stages: Sequence[OmniStageConfig], names: Sequence[str], shown: list[list[str]]
) -> list[str]:
    """The last stage's outputs. What its engine does not have comes from the stage before."""
    ports = list(shown[-1])
    for modality in map(_plain, stages[-1].output_modalities):
        if _has(stages[-1], modality):
            continue
        giver = next(
            (k for k in reversed(range(len(stages) - 1)) if _gives(stages[k], modality)), -1
        )
        if giver < 0:
            raise ConfigError(
                f"stage {stages[-1].stage_id}: no stage gives '{modality}'",
                hint="a stage of its type has: " + ", ".join(_OUTPUTS[stages[-1].engine_type]),
            )
        ports.append(f"{names[giver]}.{_port(stages[giver], modality, _OUTPUTS)}")
    if not ports:
        raise ConfigError(f"stage {stages[-1].stage_id} has no output_modalities")
    return ports


def _gives(stage: OmniStageConfig, modality: str) -> bool:
    return _has(stage, modality) and modality in map(_plain, stage.output_modalities)


def _has(stage: OmniStageConfig, modality: str) -> bool:
    if modality in _OUTPUTS[stage.engine_type]:
        return True
    return _is_own(stage) and not any(modality in ports for ports in _OUTPUTS.values())


def _port(stage: OmniStageConfig, modality: str, table: Mapping[str, Mapping[str, str]]) -> str:
    ports = table[stage.engine_type]
    if modality in ports or _is_own(stage):
        return ports.get(modality, modality)
    what = f"stage {stage.stage_id}: a stage of type {stage.engine_type} has no '{modality}' here"
    raise ConfigError(what, hint=nearest(modality, ports))


def _is_own(stage: OmniStageConfig) -> bool:
    return engine_of(stage) not in ENGINES.values()


def _plain(modality: str) -> str:
    return _ALIASES.get(modality, modality)


def _check_type(stage: OmniStageConfig) -> None:
    if stage.engine_type not in ENGINES:
        what = f"stage {stage.stage_id}: there is no engine_type '{stage.engine_type}'"
        raise ConfigError(what, hint=nearest(str(stage.engine_type), ENGINES))
