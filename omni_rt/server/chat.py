"""POST /v1/chat/completions: text, pictures and speech in the reply, whole or streamed."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request as HttpRequest
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from omni_rt.errors import BadRequest
from omni_rt.request import Audio, ChatMessage, Done, Image, Output, Request, Text
from omni_rt.runtime.stream import Stream
from omni_rt.server import sse
from omni_rt.server.errors import ErrorReply, reply_of
from omni_rt.server.gone import unless_gone
from omni_rt.server.parts import ContentPart, part_of
from omni_rt.server.speech import AudioFormat, AudioOptions, AudioReply, Talk, spoken
from omni_rt.server.state import Int, PictureFields, Seed, Served, set_fields

_Count = Annotated[int, msgspec.Meta(ge=1, le=16)]


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ExtraBody(PictureFields, forbid_unknown_fields=True):
    """Where clients without OpenAI's SDK put the extensions; the same as in the body itself."""


class ChatBody(PictureFields, kw_only=True):
    """The request, after OpenAI's reference, with extensions."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _Count | None = None
    modalities: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    audio: AudioOptions | None = None
    extra_body: ExtraBody | None = None


class ImageUrl(msgspec.Struct):
    url: str


class ImagePart(msgspec.Struct):
    image_url: ImageUrl
    type: str = "image_url"


class Reply(msgspec.Struct, omit_defaults=True):
    """A message, or in a stream the delta of one."""

    role: str | None = None
    content: str | None = None
    images: list[ImagePart] | None = None
    audio: AudioReply | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(msgspec.Struct):
    index: int
    message: Reply
    finish_reason: str


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    seed: int  # the one that was used for choice 0
    object: str = "chat.completion"


class DeltaChoice(msgspec.Struct):
    index: int
    delta: Reply
    finish_reason: str | None = None


class Delta(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | None = None
    object: str = "chat.completion.chunk"


@post("/v1/chat/completions", status_code=200)
async def chat(
    request: HttpRequest[Any, Any, Any], served: NamedDependency[Served], data: JSONBody[ChatBody]
) -> Response[Any]:
    served.check_model(data.model)
    served.check_unknown(await request.json(), ChatBody.__struct_fields__)
    served.check_ready()
    requests = [_request(served, data, k) for k in range(data.n or 1)]
    streams = served.submit_all(requests)
    head = (f"chatcmpl-{streams[0].id}", int(time.time()), served.name)
    form = data.audio.format if data.audio else None
    if data.stream:
        usage = bool(data.stream_options and data.stream_options.include_usage)
        return await sse.response(request, _events(streams, head, usage))
    outputs = await unless_gone(request, _collect_all(streams))
    return Response(_completion(outputs, head, form or "wav"))


# ---- in


def _request(served: Served, body: ChatBody, index: int) -> Request:
    if body.response_format and body.response_format.get("type") != "text":
        raise BadRequest("only response_format 'text' is supported", param="response_format")
    if body.modalities == []:
        raise BadRequest("modalities asks for nothing", param="modalities", hint="leave it out")
    if body.audio is not None:
        body.audio.check(body.modalities, streamed=bool(body.stream))
    messages = tuple(_message(message, k) for k, message in enumerate(body.messages))
    if not any(message.text.strip() or message.media_bytes for message in messages):
        raise BadRequest("the messages have no text", param="messages")
    params = set_fields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        max_tokens=_max_tokens(body),
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop=_stop(body.stop),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        voice=body.audio.voice if body.audio else None,
    )
    extra = body.extra_body.params() if body.extra_body else {}
    kinds = body.modalities
    return Request(
        messages=messages,
        outputs=() if kinds is None else served.outputs_of(kinds, "modalities"),
        params={**params, **extra, **body.params()},
        seed=None if body.seed is None else body.seed + index,
        label=(body.user or "")[:64],
        playback=bool(body.stream),
    )


def _max_tokens(body: ChatBody) -> int | None:
    newer = body.max_completion_tokens
    return body.max_tokens if newer is None else newer


def _stop(stop: str | list[str] | None) -> list[str] | None:
    stops = [stop] if isinstance(stop, str) else stop
    if stops and not all(stops):
        raise BadRequest("a stop string is empty", param="stop")
    return stops or None


def _message(message: Message, index: int) -> ChatMessage:
    content = message.content
    if not isinstance(content, list):
        return ChatMessage(message.role, content or "")
    where = f"messages[{index}].content"
    parts = tuple(part_of(part, f"{where}[{k}]") for k, part in enumerate(content))
    return ChatMessage(message.role, parts)


# ---- out, whole


async def _collect_all(streams: list[Stream]) -> list[list[Output]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_collect(stream)) for stream in streams]
    return [task.result() for task in tasks]


async def _collect(stream: Stream) -> list[Output]:
    async with stream:
        return [output async for output in stream]


def _completion(
    outputs: list[list[Output]], head: tuple[str, int, str], form: AudioFormat
) -> Completion:
    choices = [_choice(each, k, head, form) for k, each in enumerate(outputs)]
    ends = [done for each in outputs if isinstance(done := each[-1], Done)]
    return Completion(*head, choices, _usage(ends), ends[0].seed)


def _choice(
    outputs: list[Output], index: int, head: tuple[str, int, str], form: AudioFormat
) -> Choice:
    text = "".join(output.text for output in outputs if isinstance(output, Text))
    images = [_image_part(output) for output in outputs if isinstance(output, Image)]
    sounds = [output for output in outputs if isinstance(output, Audio)]
    audio = spoken(sounds, _audio_id(head, index), text, head[1], form) if sounds else None
    done = outputs[-1]
    assert isinstance(done, Done)
    return Choice(index, Reply("assistant", text, images or None, audio), done.finish_reason)


def _audio_id(head: tuple[str, int, str], index: int) -> str:
    return f"audio-{head[0].removeprefix('chatcmpl-')}-{index}"


def _image_part(image: Image) -> ImagePart:
    return ImagePart(ImageUrl(data_url(image)))


def data_url(image: Image) -> str:
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


def _usage(ends: list[Done]) -> Usage:
    prompt = sum(done.usage.get("prompt_tokens", 0) for done in ends[:1])
    reply = sum(done.usage.get("completion_tokens", 0) for done in ends)
    return Usage(prompt, reply, prompt + reply)


# ---- out, streamed


async def _events(
    streams: list[Stream], head: tuple[str, int, str], with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Raises what goes wrong before the first output; tells what goes wrong after it."""
    ends: list[Done] = []
    begun = False
    talks = [Talk(_audio_id(head, k), head[1]) for k in range(len(streams))]
    try:
        async for k, output in sse.merged(streams):
            if not begun:
                begun = True
                for index in range(len(streams)):
                    yield _event(head, index, Reply("assistant", ""))
            if isinstance(output, Text):
                talks[k].hear(output)
                yield _event(head, k, Reply(content=output.text))
            elif isinstance(output, Audio):
                yield _event(head, k, Reply(audio=talks[k].say(output)))
            elif isinstance(output, Image):
                yield _event(head, k, Reply(images=[_image_part(output)]))
            elif isinstance(output, Done):
                ends.append(output)
                if talks[k].begun:
                    yield _event(head, k, Reply(audio=talks[k].end()))
                yield _event(head, k, Reply(), output.finish_reason)
        if with_usage:
            yield sse.data(Delta(*head, [], _usage(ends)))
    except Exception as error:
        if not begun:
            raise
        yield sse.data(ErrorReply(reply_of(error)[1]))
    finally:
        for stream in streams:
            await stream.aclose()
    yield sse.DONE


def _event(
    head: tuple[str, int, str], index: int, delta: Reply, reason: str | None = None
) -> bytes:
    return sse.data(Delta(*head, [DeltaChoice(index, delta, reason)]))
