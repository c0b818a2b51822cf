"""A pipeline is one YAML file: its values, how it is read, how it is shown."""

from omni_rt.config.load import bundled, load_pipeline, parse_pipeline, presets
from omni_rt.config.model import (
    SECTIONS,
    CacheConfig,
    EdgeConfig,
    HiddenConfig,
    LimitsConfig,
    PipelineConfig,
    PlaybackConfig,
    RestartConfig,
    StageConfig,
    StreamConfig,
    parse_bytes,
)
from omni_rt.config.show import effective, schema

__all__ = [
    "SECTIONS",
    "CacheConfig",
    "EdgeConfig",
    "HiddenConfig",
    "LimitsConfig",
    "PipelineConfig",
    "PlaybackConfig",
    "RestartConfig",
    "StageConfig",
    "StreamConfig",
    "bundled",
    "effective",
    "load_pipeline",
    "parse_bytes",
    "parse_pipeline",
    "presets",
    "schema",
]
