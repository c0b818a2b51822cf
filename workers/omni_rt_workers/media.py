"""Encoding finished pictures and sound for clients."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


def png(picture: Image) -> bytes:
    """Lossless. Compressed lightly: it runs between two steps of an engine."""
    return _saved(picture, "PNG", compress_level=1)


def jpeg(picture: Image, quality: int = 90) -> bytes:
    """`quality` from 1 to 95. Transparency is lost."""
    return _saved(picture.convert("RGB"), "JPEG", quality=quality)


def pcm16(samples: torch.Tensor) -> bytes:
    """Signed 16-bit little-endian samples, from floats [samples] in -1..1 on any device."""
    import torch

    whole = (samples.detach().float().clamp(-1.0, 1.0) * 32767).round().to(torch.int16)
    return whole.cpu().contiguous().numpy().astype("<i2", copy=False).tobytes()


def _saved(picture: Image, form: str, **options: int) -> bytes:
    file = BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()
