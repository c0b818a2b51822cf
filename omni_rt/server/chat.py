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
from omni_rt.request import Audio, ChatMessage, Done, Image, Output, Part, Request, Text
from omni_rt.runtime.stream import Stream
from omni_rt.server import sse, tools
from omni_rt.server.errors import ErrorReply, reply_of
from omni_rt.server.gone import unless_gone
from omni_rt.server.logprobs import Logprobs, logprobs_of
from omni_rt.server.parts import ContentPart, part_of
from omni_rt.server.speech import AudioFormat, AudioOptions, AudioReply, Talk, spoken
from omni_rt.server.state import Int, PictureFields, Seed, Served, set_fields

_Count = Annotated[int, msgspec.Meta(ge=1, le=16)]


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[tools.Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


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
    structured_outputs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    lora: str | None = None
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
    tool_calls: list[tools.Call] | None = None
    audio: AudioReply | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Choice(msgspec.Struct):
    index: int
    message: Reply
    finish_reason: str
    logprobs: Logprobs | None = None


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
    logprobs: Logprobs | None = None


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
        logprobs=_logprobs(body),
        logit_bias=body.logit_bias or None,
        structured_outputs=_structure(body),
        tools=_tools(body),
        tool_choice=tools.choice_of(body.tool_choice) if body.tools else None,
        stop_token_ids=body.stop_token_ids,
        include_stop_str_in_output=body.include_stop_str_in_output,
        bad_words=body.bad_words,
        allowed_token_ids=body.allowed_token_ids,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        lora=body.lora,
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


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        what = "top_logprobs goes with logprobs"
        raise BadRequest(what, param="top_logprobs", hint="write logprobs: true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _tools(body: ChatBody) -> list[dict[str, Any]] | None:
    if body.parallel_tool_calls is False and body.tools:
        what = "how many tools are called is up to the model"
        raise BadRequest(what, param="parallel_tool_calls", hint="leave it out")
    return body.tools or None


def _structure(body: ChatBody) -> dict[str, Any] | None:
    """What the engine is told of `response_format`."""
    form = body.response_format or {"type": "text"}
    kind = form.get("type")
    if kind == "text":
        return body.structured_outputs or None
    if body.structured_outputs:
        what = "response_format and structured_outputs ask for the same"
        raise BadRequest(what, param="structured_outputs", hint="leave one of them out")
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise BadRequest(
            f"there is no response_format {kind!r:.50}",
            param="response_format.type",
            hint="one of: text, json_object, json_schema",
        )
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        where = "response_format.json_schema.schema"
        raise BadRequest("there is no schema", param=where, hint="it is an object")
    return {"json": schema}


def _message(message: Message, index: int) -> ChatMessage:
    where, content = f"messages[{index}]", message.content or ""
    parts: str | tuple[Part, ...] = (
        content
        if isinstance(content, str)
        else tuple(part_of(part, f"{where}.content[{k}]") for k, part in enumerate(content))
    )
    calls = tools.said_before(message.tool_calls, f"{where}.tool_calls")
    return ChatMessage(message.role, parts, calls, message.tool_call_id, message.name)


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
    texts = [output for output in outputs if isinstance(output, Text)]
    text = "".join(piece.text for piece in texts)
    calls = tools.whole(call for piece in texts for call in piece.calls)
    images = [_image_part(output) for output in outputs if isinstance(output, Image)]
    sounds = [output for output in outputs if isinstance(output, Audio)]
    audio = spoken(sounds, _audio_id(head, index), text, head[1], form) if sounds else None
    done = outputs[-1]
    assert isinstance(done, Done)
    reply = Reply("assistant", text, images or None, calls or None, audio)
    return Choice(index, reply, _reason(texts, done), logprobs_of(texts))


def _reason(texts: list[Text], done: Done) -> str:
    """Why the reply ended: its last piece may know more of it."""
    return (texts[-1].finish_reason if texts else None) or done.finish_reason


def _audio_id(head: tuple[str, int, str], index: int) -> str:
    return f"audio-{head[0].removeprefix('chatcmpl-')}-{index}"


def _image_part(image: Image) -> ImagePart:
    return ImagePart(ImageUrl(data_url(image)))


def data_url(image: Image) -> str:
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


def _usage(ends: list[Done]) -> Usage:
    prompt = sum(done.usage.get("prompt_tokens", 0) for done in ends[:1])
    reply = sum(done.usage.get("completion_tokens", 0) for done in ends)
    cached = sum(done.usage.get("cached_tokens", 0) for done in ends[:1])
    return Usage(prompt, reply, prompt + reply, PromptDetails(cached))


# ---- out, streamed


async def _events(
    streams: list[Stream], head: tuple[str, int, str], with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Raises what goes wrong before the first output; tells what goes wrong after it."""
    ends: list[Done] = []
    begun = False
    last: dict[int, Text] = {}
    talks = [Talk(_audio_id(head, k), head[1]) for k in range(len(streams))]
    try:
        async for k, output in sse.merged(streams):
            if not begun:
                begun = True
                for index in range(len(streams)):
                    yield _event(head, index, Reply("assistant", ""))
            if isinstance(output, Text):
                talks[k].hear(output)
                last[k] = output
                yield _text_event(head, k, output)
            elif isinstance(output, Audio):
                yield _event(head, k, Reply(audio=talks[k].say(output)))
            elif isinstance(output, Image):
                yield _event(head, k, Reply(images=[_image_part(output)]))
            elif isinstance(output, Done):
                ends.append(output)
                if talks[k].begun:
                    yield _event(head, k, Reply(audio=talks[k].end()))
                said = [last[k]] if k in last else []
                yield _event(head, k, Reply(), _reason(said, output))
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


def _text_event(head: tuple[str, int, str], index: int, piece: Text) -> bytes:
    calls = tools.pieces(piece.calls) or None
    content = None if calls and not piece.text else piece.text
    choice = DeltaChoice(index, Reply(content=content, tool_calls=calls), None)
    choice.logprobs = logprobs_of([piece])
    return sse.data(Delta(*head, [choice]))


def _event(
    head: tuple[str, int, str], index: int, delta: Reply, reason: str | None = None
) -> bytes:
    return sse.data(Delta(*head, [DeltaChoice(index, delta, reason)]))
