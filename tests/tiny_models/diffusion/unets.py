"""Tiny pipelines around a UNet."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)

from tests.tiny_models.diffusion.parts import POOLED_DIM, unet, vae

_UNCHECKED: dict[str, Any] = {
    "text_encoder": None,
    "tokenizer": None,
    "safety_checker": None,
    "feature_extractor": None,
    "requires_safety_checker": False,
}


def stable_diffusion() -> Any:
    scheduler = PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    return StableDiffusionPipeline(vae=vae(), unet=unet(), scheduler=scheduler, **_UNCHECKED)


def stable_diffusion_img2img() -> Any:
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    return StableDiffusionImg2ImgPipeline(vae=vae(), unet=unet(), scheduler=scheduler, **_UNCHECKED)


def stable_diffusion_inpaint() -> Any:
    scheduler = EulerDiscreteScheduler(steps_offset=1)
    model = unet(in_channels=9)
    return StableDiffusionInpaintPipeline(vae=vae(), unet=model, scheduler=scheduler, **_UNCHECKED)


def instruct_pix2pix() -> Any:
    return StableDiffusionInstructPix2PixPipeline(
        vae=vae(),
        unet=unet(in_channels=8),
        scheduler=EulerAncestralDiscreteScheduler(steps_offset=1),
        **_UNCHECKED,
    )


def sdxl() -> Any:
    model = unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + POOLED_DIM,
    )
    return StableDiffusionXLPipeline(
        vae=vae(),
        unet=model,
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        add_watermarker=False,
        **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
    )
