"""Speech in chat replies, as OpenAI has it: `audio` of the request, of a message and of a delta."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from omni_rt.errors import BadRequest
from omni_rt.request import Audio, Text
from omni_rt.wav import wav

AudioFormat = Literal["wav", "pcm16"]


class AudioOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`audio` of the request."""

    voice: str | None = None
    format: AudioFormat | None = None  # default: wav, in a stream pcm16

    def check(self, modalities: list[str] | None, *, streamed: bool) -> None:
        """Raises `BadRequest` if it does not go together with the rest of the request."""
        if modalities is not None and "audio" not in modalities:
            hint = 'write modalities: ["text", "audio"]'
            raise BadRequest("audio is described but not asked for", param="audio", hint=hint)
        if streamed and self.format == "wav":
            what = "a stream carries samples without a header, not wav"
            raise BadRequest(what, param="audio.format", hint="write pcm16")


class AudioReply(msgspec.Struct, omit_defaults=True):
    """`audio` of a message, or in a stream of a delta."""

    id: str
    data: str | None = None  # base64
    transcript: str | None = None
    expires_at: int | None = None  # nothing is kept: the time of the reply itself


def spoken(
    pieces: list[Audio], name: str, transcript: str, created: int, form: AudioFormat
) -> AudioReply:
    """All pieces of a reply as one."""
    data = b"".join(piece.data for piece in pieces)
    if form == "wav":
        data = wav(data, pieces[0].sample_rate)
    return AudioReply(name, base64.b64encode(data).decode(), transcript, created)


@dataclass(slots=True)
class Talk:
    """The speech of one streamed reply."""

    name: str
    created: int
    begun: bool = False
    _words: list[str] = field(default_factory=list)

    def hear(self, text: Text) -> None:
        self._words.append(text.text)

    def say(self, piece: Audio) -> AudioReply:
        """With the text that came since the piece before."""
        self.begun = True
        return AudioReply(self.name, base64.b64encode(piece.data).decode(), self._heard())

    def end(self) -> AudioReply:
        """After the last piece."""
        return AudioReply(self.name, None, self._heard(), self.created)

    def _heard(self) -> str | None:
        words = "".join(self._words)
        self._words.clear()
        return words or None
