"""Reading the speech parts of a Qwen2.5-Omni checkpoint: token2wav's weights and the voices."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel

from omni_rt.errors import ConfigError
from omni_rt_workers.models.qwen2_5_omni.solver import Voice

_PREFIX = "token2wav."


def load_token2wav(folder: Path, device: torch.device) -> Qwen2_5OmniToken2WavModel:
    """In float32, which the model needs. Raises `ConfigError` if weights are missing."""
    model = Qwen2_5OmniToken2WavModel(_config(folder))
    missing, _ = model.load_state_dict(_tensors(folder), strict=False)
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} weights of token2wav, as {missing[0]}")
    return model.float().eval().to(device)


def load_voices(folder: Path, device: torch.device) -> dict[str, Voice]:
    """By name, in the file's order."""
    file = folder / "spk_dict.pt"
    if not file.is_file():
        raise ConfigError(f"there are no voices: {folder} has no spk_dict.pt")
    voices = torch.load(file, map_location=device, weights_only=True)
    return {
        name: Voice(voice["cond"].float().view(-1), voice["ref_mel"].float().squeeze(0))
        for name, voice in voices.items()
    }


def _config(folder: Path) -> Qwen2_5OmniToken2WavConfig:
    try:
        parts = json.loads((folder / "config.json").read_text())
        return Qwen2_5OmniToken2WavConfig.from_dict(parts["token2wav_config"])
    except (OSError, KeyError) as error:
        raise ConfigError(f"{folder} is no checkpoint of Qwen2.5-Omni: no {error}") from error


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in _files(folder):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():
                if name.startswith(_PREFIX):
                    found[name.removeprefix(_PREFIX)] = shard.get_tensor(name)
    return found


def _files(folder: Path) -> list[Path]:
    """The shards that hold weights of token2wav."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    shards = json.loads(index.read_text())["weight_map"]
    return sorted({folder / file for name, file in shards.items() if name.startswith(_PREFIX)})
