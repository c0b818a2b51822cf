"""Content parts of a chat message, as OpenAI has them: text, pictures, sound and film."""

from __future__ import annotations

import base64
import binascii

import msgspec

from omni_rt.errors import BadRequest
from omni_rt.request import AudioPart, ImagePart, Part, TextPart, VideoPart

_KINDS = ("text", "image_url", "input_audio", "video_url")


class Url(msgspec.Struct):
    url: str
    detail: str | None = None  # OpenAI's; of no effect


class InputAudio(msgspec.Struct):
    data: str  # base64
    format: str  # "wav", "mp3", "flac", ...


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    image_url: Url | None = None
    input_audio: InputAudio | None = None
    video_url: Url | None = None


def part_of(part: ContentPart, where: str) -> Part:
    """Raises `BadRequest` for a part that is not understood, or a file that is not in it."""
    if part.type not in _KINDS:
        raise BadRequest(
            f"there are no parts of type '{part.type[:40]}'",
            param=f"{where}.type",
            hint=f"one of: {', '.join(_KINDS)}",
        )
    if getattr(part, part.type) is None:
        raise BadRequest(
            f"a part of type '{part.type}' has no {part.type}", param=f"{where}.{part.type}"
        )
    if part.text is not None and part.type == "text":
        return TextPart(part.text)
    if part.input_audio is not None and part.type == "input_audio":
        data = _bytes(part.input_audio.data, f"{where}.input_audio.data")
        return AudioPart(data, f"audio/{part.input_audio.format[:40]}")
    if part.image_url is not None and part.type == "image_url":
        return ImagePart(*_file(part.image_url.url, f"{where}.image_url.url"))
    assert part.video_url is not None
    return VideoPart(*_file(part.video_url.url, f"{where}.video_url.url"))


def _file(url: str, where: str) -> tuple[bytes, str]:
    """What a data: URL holds, and its media type."""
    head, comma, data = url.partition(",")
    if not (head[:5].lower() == "data:" and comma and head.lower().endswith(";base64")):
        raise BadRequest(
            "only data: URLs are read, nothing is fetched from elsewhere",
            param=where,
            hint="send the file itself: data:image/png;base64,...",
        )
    return _bytes(data, where), head[5:].partition(";")[0][:80]


def _bytes(data: str, where: str) -> bytes:
    try:
        found = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"this is not base64: {error}", param=where) from error
    if not found:
        raise BadRequest("the file is empty", param=where)
    return found
