"""Pictures, sound and film of a prompt, decoded as vLLM's processors take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO

from omni_rt.errors import BadRequest

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


def _film(data: bytes) -> Any:
    return VideoMediaIO(ImageMediaIO()).load_bytes(data)


_READERS: dict[str, Callable[[bytes], Any]] = {
    "image": lambda data: ImageMediaIO().load_bytes(data),
    "audio": lambda data: AudioMediaIO(audio_backend="pyav").load_bytes(data),
    "video": _film,
}
