"""What is asked and what is answered: plain values, the same for HTTP, CLI and embedders."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """A picture as a file: PNG, JPEG, WebP, ..."""

    data: bytes
    media_type: str = ""  # e.g. "image/png"; the file itself decides how it is read


class AudioPart(msgspec.Struct, frozen=True, tag="audio"):
    """Sound as a file: WAV, FLAC, MP3, Ogg, ..."""

    data: bytes
    media_type: str = ""


class VideoPart(msgspec.Struct, frozen=True, tag="video"):
    """A film as a file: MP4, WebM, ..."""

    data: bytes
    media_type: str = ""


Part = TextPart | ImagePart | AudioPart | VideoPart


def kind_of(part: Part) -> str:
    """ "text", "image", "audio" or "video"."""
    return str(part.__struct_config__.tag)


class ToolCall(msgspec.Struct, frozen=True):
    """A function that the model wants called, `arguments` as the JSON that it wrote."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation: text, or text, pictures, sound and film in order."""

    role: str
    content: str | tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant's turn
    tool_call_id: str | None = None  # of a tool's turn: the call it answers
    name: str | None = None  # of who speaks, or of the tool

    @property
    def parts(self) -> tuple[Part, ...]:
        return (TextPart(self.content),) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def media_bytes(self) -> int:
        return sum(len(part.data) for part in self.parts if not isinstance(part, TextPart))


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One thing asked of a pipeline.

    `params` are sampling and diffusion parameters by their usual names (`temperature`,
    `max_tokens`, `num_inference_steps`, `guidance_scale`, `height`, ...). Each goes to every stage
    on the way that accepts it; one that no stage accepts is refused. `stage_params` address one
    stage by name and win over `params`.
    """

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    outputs: tuple[str, ...] = ()  # names under `outputs:` of the pipeline; empty = all of them
    params: dict[str, Any] = {}
    stage_params: dict[str, dict[str, Any]] = {}
    seed: int | None = None  # None: chosen at random; `Done.seed` says which was used
    priority: int = 0  # higher goes first
    deadline_s: float | None = None  # seconds from submission
    # Its sound is played while it comes: refused if it, or that of others, could not keep up.
    playback: bool = False
    label: str = ""  # the caller's own id, for logs; never used to address the request


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token that might have come, and the natural logarithm of its probability."""

    token: str
    id: int
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token of the reply, with the likeliest ones at its place if the request asked for them."""

    token: str
    id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()  # likeliest first


class CallPiece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a call of a tool: the first one has id and name, `arguments` joined are JSON."""

    call: int  # 0, 1, 2, ... in a reply
    id: str = ""
    name: str = ""
    arguments: str = ""


class Text(msgspec.Struct, frozen=True, tag=True):
    """A piece of the reply's text, in order, and what goes with it."""

    text: str
    tokens: tuple[int, ...] = ()
    output: str = "text"
    index: int = 0  # which of the request's `n` replies
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, with the parameter `logprobs`
    calls: tuple[CallPiece, ...] = ()  # of tools
    # On the last piece of a reply of several, or that calls tools: "stop", "length", "tool_calls".
    finish_reason: str | None = None


class Image(msgspec.Struct, frozen=True, tag=True):
    """A finished picture, encoded."""

    data: bytes
    media_type: str  # e.g. "image/png"
    width: int  # pixels, of the encoded picture
    height: int
    seed: int  # the seed that made it
    output: str = "image"


class Audio(msgspec.Struct, frozen=True, tag=True):
    """A piece of sound, in order: all pieces of an output, joined, are the whole of it.

    `data` are signed 16-bit little-endian samples of one channel, without a header
    ("audio/pcm"); `omni_rt.wav.wav` makes a file of them.
    """

    data: bytes
    media_type: str
    sample_rate: int  # Hz
    index: int  # 0, 1, 2, ... per output
    last: bool  # True: no more will come. A stage that did not know it then leaves it False.
    output: str = "audio"


class Data(msgspec.Struct, frozen=True, tag=True):
    """Raw bytes of a port that is neither text nor encoded media (latents, hidden states, ...)."""

    data: bytes
    dtype: str  # torch's name without the prefix: "float32", "bfloat16", "uint8", ...
    shape: tuple[int, ...]
    output: str
    index: int = 0  # which of the request's `n` replies


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A stage has done `step` of `total` steps of this request."""

    stage: str
    step: int
    total: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The last item of every request that was answered."""

    finish_reason: Literal["stop", "length"]
    usage: dict[str, int]  # prompt_tokens, completion_tokens, images, ...
    seed: int
    stage_s: dict[str, float]  # seconds from submission to the end of each stage
    first_output_s: dict[str, float] = {}  # and to the first thing that came out of it


Output = Text | Image | Audio | Data | Progress | Done
