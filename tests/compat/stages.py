"""Chains of simulated stages, in place of a language model and a diffusion model."""

from __future__ import annotations

from typing import Any

from omni_rt import OmniStageConfig


def writer(**changes: Any) -> OmniStageConfig:
    ports = {"text": {"every": 1}, "hidden": {"bytes": 64}}
    fields = {
        "stage_id": 0,
        "engine_type": "AR",
        "model_path": "none",
        "input_modalities": ["text"],
        "output_modalities": ["text", "hidden"],
        "vllm_config": {"step_s": 0.001, "steps": 3, "ports": ports},
        "executor_class": "simulated",
    }
    return OmniStageConfig(**{**fields, **changes})


def painter(**changes: Any) -> OmniStageConfig:
    options = {
        "step_s": 0.001,
        "steps": 3,
        "inputs": ["prompt_embeds"],
        "ports": {"image": {"kind": "image"}},
    }
    fields = {
        "stage_id": 1,
        "engine_type": "DiT",
        "model_path": "none",
        "input_modalities": ["hidden"],
        "output_modalities": ["text", "image"],
        "vllm_config": options,
        "executor_class": "simulated",
    }
    return OmniStageConfig(**{**fields, **changes})
