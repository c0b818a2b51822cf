"""Tiny pipelines that make films."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)

from tests.tiny_models.diffusion.parts import JOINT_DIM, seeded


def wan() -> Any:
    return WanPipeline(transformer=_transformer(4), **_parts())


def wan_image_to_video() -> Any:
    """The first frame is given: its latents and their mask go beside the noise."""
    return WanImageToVideoPipeline(
        transformer=_transformer(4 + 4 + 4), image_encoder=None, image_processor=None, **_parts()
    )


def _parts() -> dict[str, Any]:
    decoder = seeded(
        AutoencoderKLWan,
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.0, 1.1, 0.9, 1.0],
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return {"vae": decoder, "scheduler": scheduler, "text_encoder": None, "tokenizer": None}


def _transformer(channels: int) -> Any:
    return seeded(
        WanTransformer3DModel,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=4,
        text_dim=JOINT_DIM,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
