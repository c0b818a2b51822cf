"""A tiny random token2wav in a Qwen2.5-Omni checkpoint, loud and wild enough to tell errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel

from tests.tiny_models.qwen2_5_omni import make_audible

CODES = 256  # codes used in tests
BLOCK = 12  # codes of a block
HOP = 480  # samples of a code
REFERENCES = {"Chelsie": 30, "Ethan": 30, "Long": 41}  # mel frames of each voice's reference

DIT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 32,
    "ff_mult": 2,
    "emb_dim": 32,
    "num_embeds": CODES + 1,
    "block_size": 24,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    "repeats": 2,
    "enc_emb_dim": 32,
    "enc_dim": 16,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
    "max_position_embeddings": 400,
}
BIGVGAN = {
    "upsample_initial_channel": 64,
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
    "upsample_rates": [5, 3, 2, 2, 2, 2],
    "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
}


def model(seed: int = 0, wild: float = 0.15) -> Qwen2_5OmniToken2WavModel:
    torch.manual_seed(seed)
    config = Qwen2_5OmniToken2WavConfig(dit_config=DIT, bigvgan_config=BIGVGAN)
    made = Qwen2_5OmniToken2WavModel(config).float().eval()
    with torch.no_grad():
        make_audible(made, wild)
    return made


def save(folder: Path, made: Any) -> Path:
    """As in a whole checkpoint: a prefix, several files, weights of others among them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"token2wav.{name}": tensor for name, tensor in made.state_dict().items()}
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, its in files.items():
        save_file({name: weights[name].contiguous() for name in its}, folder / file)
    save_file({"thinker.lm_head.weight": torch.zeros(2, 2)}, folder / "c.safetensors")
    places = {name: file for file, its in files.items() for name in its}
    places["thinker.lm_head.weight"] = "c.safetensors"
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "qwen2_5_omni", "token2wav_config": made.config.to_dict()}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    torch.save(voices(), folder / "spk_dict.pt")
    return folder


def voices() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: {
            "bos_token": 315,
            "cond": torch.randn(1, 32, generator=generator),
            "ref_mel": torch.randn(1, frames, 80, generator=generator),
        }
        for name, frames in REFERENCES.items()
    }


def codes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, CODES, (count,), generator=torch.Generator().manual_seed(seed))
