"""Tiny pipelines of the real classes, saved as folders: those that most tests need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_models.diffusion.parts import CAPTION_DIM, JOINT_DIM, POOLED_DIM
from tests.tiny_models.diffusion.transformers import flux, sd3, zimage, zimage_with_text
from tests.tiny_models.diffusion.unets import stable_diffusion

__all__ = [
    "CAPTION_DIM",
    "FAMILIES",
    "JOINT_DIM",
    "POOLED_DIM",
    "flux",
    "save",
    "sd3",
    "stable_diffusion",
    "zimage",
    "zimage_with_text",
]

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
