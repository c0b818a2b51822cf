"""Tiny pipelines around a transformer that make pictures."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLQwenImage,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImageImg2ImgPipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import Qwen3Config, Qwen3Model

from tests.tiny_models.diffusion.parts import (
    CAPTION_DIM,
    JOINT_DIM,
    POOLED_DIM,
    byte_tokenizer,
    seeded,
    vae,
)

_ONE_ENCODER = dict.fromkeys(("text_encoder", "tokenizer"))
_TWO_ENCODERS = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
_THREE_ENCODERS = _TWO_ENCODERS | dict.fromkeys(("text_encoder_3", "tokenizer_3"))


def zimage(pipeline: Any = ZImagePipeline) -> Any:
    transformer = seeded(
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
    return pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
        vae=vae(),
        transformer=transformer,
        **_ONE_ENCODER,
    )


def zimage_img2img() -> Any:
    return zimage(ZImageImg2ImgPipeline)


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
    pipeline.register_modules(text_encoder=Qwen3Model(config).eval(), tokenizer=byte_tokenizer())
    return pipeline


def sd3() -> Any:
    transformer = seeded(
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
        vae=vae(),
        **_THREE_ENCODERS,
    )


def flux(pipeline: Any = FluxPipeline) -> Any:
    transformer = seeded(
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
    return pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(),
        transformer=transformer,
        **_TWO_ENCODERS,
    )


def flux_img2img() -> Any:
    return flux(FluxImg2ImgPipeline)


def flux_kontext() -> Any:
    return flux(FluxKontextPipeline)


def qwen_image() -> Any:
    transformer = seeded(
        QwenImageTransformer2DModel,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=JOINT_DIM,
        axes_dims_rope=(4, 6, 6),
    )
    decoder = seeded(
        AutoencoderKLQwenImage,
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.0, 1.1, 0.9, 1.0],
    )
    return QwenImagePipeline(
        transformer=transformer,
        vae=decoder,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **_ONE_ENCODER,
    )


def pixart_sigma() -> Any:
    transformer = seeded(
        PixArtTransformer2DModel,
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=JOINT_DIM,
        use_additional_conditions=False,
        norm_type="ada_norm_single",
    )
    return PixArtSigmaPipeline(
        transformer=transformer,
        vae=vae(),
        scheduler=DPMSolverMultistepScheduler(),
        **_ONE_ENCODER,
    )


def sana() -> Any:
    transformer = seeded(
        SanaTransformer2DModel,
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=JOINT_DIM,
    )
    decoder = seeded(
        AutoencoderDC,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    flow = DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    return SanaPipeline(transformer=transformer, vae=decoder, scheduler=flow, **_ONE_ENCODER)
