"""Tiny pipelines of the real classes with seeded random weights, saved as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

CAPTION_DIM = 16  # channels of ZImage's prompt_embeds
JOINT_DIM = 32  # of SD3's and Flux's
POOLED_DIM = 24


def zimage() -> Any:
    transformer = _seeded(
        ZImageTransformer2DModel,
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=CAPTION_DIM,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
        vae=_vae(),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )


def sd3() -> Any:
    transformer = _seeded(
        SD3Transformer2DModel,
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=JOINT_DIM,
        pooled_projection_dim=POOLED_DIM,
        out_channels=4,
        pos_embed_max_size=16,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(),
        **dict.fromkeys(
            [f"{part}{n}" for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")]
        ),
    )


def flux() -> Any:
    transformer = _seeded(
        FluxTransformer2DModel,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=JOINT_DIM,
        pooled_projection_dim=POOLED_DIM,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )


def stable_diffusion() -> Any:
    unet = _seeded(
        UNet2DConditionModel,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=JOINT_DIM,
        attention_head_dim=4,
    )
    return StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=None,
        tokenizer=None,
        unet=unet,
        scheduler=PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def zimage_with_text() -> Any:
    """ZImage that reads prompts: a random Qwen3 over bytes."""
    pipeline = zimage()
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=CAPTION_DIM,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    torch.manual_seed(0)
    letters = {chr(byte): byte for byte in range(256)}
    words = Tokenizer(models.WordLevel({**letters, "<pad>": 256, "<unk>": 257}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", padding_side="right"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    pipeline.register_modules(text_encoder=Qwen3Model(config).eval(), tokenizer=tokenizer)
    return pipeline


FAMILIES = {
    "zimage": zimage,
    "zimage_with_text": zimage_with_text,
    "sd3": sd3,
    "flux": flux,
    "stable_diffusion": stable_diffusion,
}


def save(pipeline: Any, folder: Path) -> str:
    pipeline.save_pretrained(folder)
    return str(folder)


def _vae() -> Any:
    return _seeded(
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


def _seeded(cls: Any, **config: Any) -> Any:
    """With every weight random, those too that start as zeros, so that nothing cancels out."""
    torch.manual_seed(0)
    module = cls(**config).eval()
    for parameter in module.parameters():
        if parameter.ndim < 2 or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
            parameter.data += 1.0 * (parameter.ndim == 1)
    return module
