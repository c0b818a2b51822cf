"""Small pictures of what a request has come to, from its latents, without the decoder.

A linear map from a latent's channels to red, green and blue gives one pixel for each latent. It is
fitted once to the pipeline's own decoder, so it is right for whatever the decoder was trained on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

_SIDE = 16  # latents of each side of the noise that is decoded for the fit
_DRAWS = 4


class Previews:
    """Pictures of latents [1 or more, channels, rows, columns]."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights  # [channels + 1, 3], the last row is added to all

    def picture(self, latents: torch.Tensor) -> Image:
        """Of the first in the batch."""
        from PIL import Image as pil

        channels = latents[0].float()
        colours = torch.tensordot(channels, self._weights[:-1], dims=([0], [0])) + self._weights[-1]
        levels = ((colours.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return pil.fromarray(levels.cpu().numpy())


def fit(pipeline: Any) -> Previews | None:
    """None if the pipeline has no decoder of pictures whose latents it steps as they are."""
    vae: Any = getattr(pipeline, "vae", None)
    config = getattr(vae, "config", None)
    channels = getattr(config, "latent_channels", None)
    model = getattr(pipeline, "transformer", None) or getattr(pipeline, "unet", None)
    taken = getattr(getattr(model, "config", None), "in_channels", None)
    if channels is None or taken != channels or hasattr(pipeline, "video_processor"):
        return None
    scale = getattr(config, "scaling_factor", None) or 1.0
    shift = getattr(config, "shift_factor", None) or 0.0
    latents = _noise(channels)
    given = (latents / scale + shift).to(vae.device, vae.dtype)
    try:
        decoded = vae.decode(given, return_dict=False)[0]
    except Exception as error:  # a decoder that wants more than latents
        log.info("no previews: %s: %s", type(error).__name__, error)
        return None
    if decoded.ndim != 4 or decoded.shape[1] != 3:
        return None
    colours = functional.adaptive_avg_pool2d(decoded.float().cpu(), _SIDE)
    ones = torch.ones(latents.shape[0], 1, _SIDE, _SIDE)
    known = torch.cat([latents, ones], 1).movedim(1, -1).flatten(0, 2)
    weights = torch.linalg.lstsq(known, colours.movedim(1, -1).flatten(0, 2)).solution
    return Previews(weights.to(vae.device))


def _noise(channels: int) -> torch.Tensor:
    """Of several coarsenesses, as pictures are."""
    generator = torch.Generator().manual_seed(0)
    sides = [_SIDE >> (n % 3) for n in range(_DRAWS)]
    draws = [torch.randn(1, channels, side, side, generator=generator) for side in sides]
    return torch.cat([functional.interpolate(one, size=_SIDE) for one in draws])
