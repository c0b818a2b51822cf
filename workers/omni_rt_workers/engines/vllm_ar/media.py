"""Pictures, sound and film of a prompt, decoded as vLLM's processors take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any

import av
import numpy as np
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

from omni_rt.errors import BadRequest

_MAX_SOUND_S = 1800  # once it is unpacked; a small file can hold hours
_WORDS = {"image": "images", "audio": "sound", "video": "film"}


def decoded(parts: Iterable[dict[str, Any]], model: str, takes: set[str]) -> dict[str, list[Any]]:
    """vLLM's `multi_modal_data` of the parts that are files, by modality and in their order.

    Pictures are PIL images in RGB, sound is (float32 samples of one channel, Hz) and film
    (uint8 frames, facts about them). `takes` are the modalities that the model understands.
    Raises `BadRequest` for others and for what cannot be read.
    """
    found: dict[str, list[Any]] = {}
    for part in parts:
        modality = part["type"]
        if modality == "text":
            continue
        if modality not in takes:
            raise BadRequest(
                f"model {model} takes no {_WORDS.get(modality, modality)}", param="messages"
            )
        found.setdefault(modality, []).append(_read(modality, part["data"]))
    return found


def _read(modality: str, data: bytes) -> Any:
    try:
        read = _READERS[modality](data)
    except Exception as error:  # whatever the decoders raise on a broken file
        what = f"the {modality} of {len(data)} bytes cannot be read: {error}"
        raise BadRequest(what, param="messages") from error
    return getattr(read, "media", read)


def _sound(data: bytes) -> tuple[Any, int]:
    """vLLM's own decoder leaves integer samples as they are (0.32), models want -1 to 1."""
    with av.open(BytesIO(data), "r") as file:
        stream = file.streams.audio[0]
        to_floats = av.AudioResampler(format="flt", layout="mono")
        pieces, count = [], 0
        for frame in file.decode(stream):
            pieces += to_floats.resample(frame)
            count += frame.samples
            if count > _MAX_SOUND_S * stream.rate:
                raise ValueError(f"it is longer than {_MAX_SOUND_S} s")
        pieces += to_floats.resample(None)
        samples = np.concatenate([piece.to_ndarray().reshape(-1) for piece in pieces])
        return samples, int(stream.rate)


def _film(data: bytes) -> Any:
    return VideoMediaIO(ImageMediaIO()).load_bytes(data)


_READERS: dict[str, Callable[[bytes], Any]] = {
    "image": lambda data: ImageMediaIO().load_bytes(data),
    "audio": _sound,
    "video": _film,
}
