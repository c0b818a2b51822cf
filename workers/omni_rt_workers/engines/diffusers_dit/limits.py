"""What a request may ask of a pipeline: the operator's limits, and those of the model itself.

They are found once, when the pipeline has loaded, so that a request beyond them is refused before
it is queued and before anything of it is on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_rt.errors import BadRequest

if TYPE_CHECKING:
    import torch

# The config entry that tells the channels of prompt_embeds, for models where it is known that they
# reach it as they are. Others find out by themselves that a width is wrong.
_TEXT_WIDTH = {
    "CogVideoXTransformer3DModel": "text_embed_dim",
    "FluxTransformer2DModel": "joint_attention_dim",
    "PixArtTransformer2DModel": "caption_channels",
    "QwenImageTransformer2DModel": "joint_attention_dim",
    "SanaTransformer2DModel": "caption_channels",
    "SD3Transformer2DModel": "joint_attention_dim",
    "UNet2DConditionModel": "cross_attention_dim",
    "WanTransformer3DModel": "text_dim",
    "ZImageTransformer2DModel": "cap_feat_dim",
}
_POOLED_WIDTH = {
    "FluxTransformer2DModel": "pooled_projection_dim",
    "SD3Transformer2DModel": "pooled_projection_dim",
}
_RAGGED_BLOCK = 32  # ZImage pads its text to a multiple of this many tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of request parameters, from the stage's options."""

    max_side: int = 2048  # pixels
    max_steps: int = 1000
    max_frames: int = 257
    max_pixels: int | None = None  # height x width x frames; None: what memory allows


def longest_side(pipeline: Any, side: str) -> int | None:
    """Pixels of the largest `side` ("height" or "width") that the model has positions for, if it
    has a table of them."""
    model = getattr(pipeline, "transformer", None)
    config: Any = getattr(model, "config", None)
    factor = int(getattr(pipeline, "vae_scale_factor", 8))
    row = 1 if side == "height" else 2
    if model is None:
        return None
    lens = getattr(config, "axes_lens", None)  # frames and text, rows, columns
    patches = getattr(config, "all_patch_size", None)
    if lens and len(lens) == 3 and patches:
        return int(lens[row] * factor * patches[0])
    if type(model).__name__ == "SD3Transformer2DModel":
        return int(config.pos_embed_max_size * config.patch_size * factor)
    if type(model).__name__ == "WanTransformer3DModel":
        factor = int(getattr(pipeline, "vae_scale_factor_spatial", factor))
        return int(config.rope_max_seq_len * config.patch_size[row] * factor)
    return None


def most_tokens(pipeline: Any) -> int | None:
    """The longest text that the model has positions for, if it has a table of them."""
    model = getattr(pipeline, "transformer", None)
    if model is None or type(model).__name__ != "ZImageTransformer2DModel":
        return None
    # The picture's position comes after the padded text's, which begins at 1.
    return (int(model.config.axes_lens[0]) - 2) // _RAGGED_BLOCK * _RAGGED_BLOCK


def check_embeddings(stage: str, name: str, value: torch.Tensor, pipeline: Any) -> None:
    """Raises `BadRequest` if `value`, as it arrived, is not what the model can take."""
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise BadRequest(f"{name} has values that are not finite", param=name, stage=stage)
    width = _width(pipeline, name)
    if width is not None and (not value.ndim or value.shape[-1] != width):
        raise BadRequest(
            f"{name} must have {width} channels, got shape {list(value.shape)}",
            param=name,
            stage=stage,
            hint="take the layer of the text model that this pipeline was trained with",
        )
    most = most_tokens(pipeline)
    text = name.endswith("_embeds") and "pooled" not in name and value.ndim >= 2
    if text and most is not None and value.shape[-2] > most:
        raise BadRequest(
            f"{name} must have at most {most} tokens, got {value.shape[-2]}",
            param=name,
            stage=stage,
        )


def _width(pipeline: Any, name: str) -> int | None:
    if not name.removeprefix("negative_").startswith(("prompt_embeds", "pooled_prompt_embeds")):
        return None
    if name.endswith("_mask"):
        return None
    model = getattr(pipeline, "transformer", None) or getattr(pipeline, "unet", None)
    table = _POOLED_WIDTH if "pooled" in name else _TEXT_WIDTH
    config = getattr(model, "config", None)
    width = getattr(config, table.get(type(model).__name__, ""), None)
    if getattr(config, "encoder_hid_dim", None) is not None:
        return None  # a UNet that projects its text first
    return width if isinstance(width, int) else None


def most_pixels(pipeline: Any, limits: Limits, room: int | None) -> int | None:
    """Height x width x frames that a request may have: the operator's limit, and what is estimated
    to fit into `room` bytes beside the weights. None: no limit is known."""
    each = bytes_per_pixel(pipeline)
    fits = None if room is None or not each else max(room, 0) // each
    return min((one for one in (limits.max_pixels, fits) if one is not None), default=None)


def bytes_per_pixel(pipeline: Any) -> int:
    """An estimate of what one request holds at once at its peak, for each pixel that it makes.

    For pictures the peak is the decoder's last block: about four tensors at full resolution with
    the channels of the block before it. Films are decoded in slices; for them only the finished
    frames count, as float32 and again as they are converted. 0 if there is no decoder.
    """
    vae = getattr(pipeline, "vae", None)
    if vae is None:
        return 0
    channels = getattr(vae.config, "block_out_channels", None)
    if hasattr(pipeline, "video_processor") or not channels:
        return 2 * 3 * 4
    widest = channels[1] if len(channels) > 1 else channels[0]
    return int(4 * widest * vae.dtype.itemsize)
