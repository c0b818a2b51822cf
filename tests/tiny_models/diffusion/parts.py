"""Parts that several tiny pipelines have: seeded modules, decoders, UNets, a tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CAPTION_DIM = 16  # channels of ZImage's prompt_embeds
JOINT_DIM = 32  # of everybody else's
POOLED_DIM = 24


def seeded(cls: Any, **config: Any) -> Any:
    """With every weight random, those too that start as zeros, so that nothing cancels out."""
    torch.manual_seed(0)
    module = cls(**config).eval()
    for parameter in module.parameters():
        if parameter.ndim < 2 or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
            parameter.data += 1.0 * (parameter.ndim == 1)
    return module


def vae() -> Any:
    """Four channels, two pixels for each latent."""
    return seeded(
        AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.7,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def unet(**more: Any) -> Any:
    config: dict[str, Any] = {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": JOINT_DIM,
        "attention_head_dim": 4,
    }
    return seeded(UNet2DConditionModel, **config | more)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token; a chat template of one line for each message."""
    letters = {chr(byte): byte for byte in range(256)}
    words = Tokenizer(models.WordLevel({**letters, "<pad>": 256, "<unk>": 257}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", padding_side="right"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    return tokenizer
