"""The tiny pipelines by name, and what each of them is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.tiny_models.diffusion import transformers, unets, video
from tests.tiny_models.diffusion.parts import CAPTION_DIM, JOINT_DIM, POOLED_DIM

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """How to make a pipeline, and how its requests look."""

    make: Callable[[], Any]
    pooled: bool = False  # prompts have a pooled embedding too
    mask: str | None = None  # the name of the prompt's mask
    negative: bool = True  # takes embeddings of a negative prompt
    pictures: tuple[str, ...] = ()  # inputs that are pictures
    guidance: str = "guidance_scale"
    scales: tuple[float, ...] = (1.0, 3.0)  # of guidance: none, and some
    params: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((32, 32), (16, 32))  # height, width
    sized: bool = True  # takes height and width; else a picture has the size
    lists: bool = False  # embeddings are lists of [tokens, channels]
    width: int = JOINT_DIM
    plainly: dict[str, Any] = field(default_factory=dict)  # what a plain call must be told besides
    apart: str = ""  # why its requests are not run together, if they are not

    def save(self, folder: Path) -> None:
        self.make().save_pretrained(folder)

    def inputs(self, seed: int, size: tuple[int, int] = (32, 32), tokens: int = 7) -> Inputs:
        """Tensors by port, as a stage is handed them: without a batch axis."""
        found: Inputs = {}
        for sign, number in (("", seed), ("negative_", 77))[: 2 if self.negative else 1]:
            found[f"{sign}prompt_embeds"] = noise(tokens, self.width, seed=number)
            if self.pooled:
                found[f"{sign}pooled_prompt_embeds"] = noise(POOLED_DIM, seed=number)
            if self.mask:
                mask = torch.ones(tokens, dtype=torch.int64)
                mask[tokens - 1 - number % 2 :] = 0
                found[f"{sign}{self.mask}"] = mask
        for name in self.pictures:
            found[name] = picture(*size, seed=seed)
        return found

    def asked(self, steps: int, size: tuple[int, int], scale: float) -> dict[str, Any]:
        """Parameters of a request."""
        height, width = size
        sides = {"height": height, "width": width} if self.sized else {}
        return {**self.params, **sides, "num_inference_steps": steps, self.guidance: scale}

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """The same for a plain call of the pipeline."""
        return {name: self._argument(value) for name, value in inputs.items()}

    def _argument(self, value: torch.Tensor) -> Any:
        if value.dtype is torch.uint8:
            return Image.fromarray(value.numpy())
        return [value] if self.lists else value.unsqueeze(0)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))


def picture(height: int, width: int, seed: int) -> torch.Tensor:
    """uint8 `[height, width, 3]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)


_ZIMAGE: dict[str, Any] = {"scales": (0.0, 2.5), "lists": True, "width": CAPTION_DIM}
_UNBINNED: dict[str, Any] = {
    "params": {"use_resolution_binning": False},
    "mask": "prompt_attention_mask",
    "plainly": {"negative_prompt": None},  # its default is "", which forbids embeddings of one
}
_FILM: dict[str, Any] = {"params": {"num_frames": 5}}

FAMILIES: dict[str, Family] = {
    "zimage": Family(transformers.zimage, **_ZIMAGE),
    "zimage_img2img": Family(transformers.zimage_img2img, pictures=("image",), **_ZIMAGE),
    "sd3": Family(transformers.sd3, pooled=True),
    "flux": Family(transformers.flux, pooled=True, guidance="true_cfg_scale"),
    "flux_img2img": Family(
        transformers.flux_img2img, pooled=True, guidance="true_cfg_scale", pictures=("image",)
    ),
    "flux_kontext": Family(
        transformers.flux_kontext,
        pooled=True,
        guidance="true_cfg_scale",
        pictures=("image",),
        params={"_auto_resize": False, "max_area": 32 * 32},
    ),
    "qwen_image": Family(
        transformers.qwen_image, mask="prompt_embeds_mask", guidance="true_cfg_scale"
    ),
    "pixart_sigma": Family(transformers.pixart_sigma, **_UNBINNED),
    "sana": Family(transformers.sana, sizes=((32, 32), (64, 32)), **_UNBINNED),
    "stable_diffusion": Family(unets.stable_diffusion),
    "stable_diffusion_img2img": Family(
        unets.stable_diffusion_img2img, pictures=("image",), sized=False
    ),
    "stable_diffusion_inpaint": Family(
        unets.stable_diffusion_inpaint, pictures=("image", "mask_image")
    ),
    "instruct_pix2pix": Family(unets.instruct_pix2pix, pictures=("image",), sized=False),
    "sdxl": Family(unets.sdxl, pooled=True),
    "wan": Family(video.wan, **_FILM),
    "wan_image_to_video": Family(video.wan_image_to_video, pictures=("image",), **_FILM),
}
