"""POST /v1/chat/completions: text and pictures in the reply, whole or streamed."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import Request as HttpRequest
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from litestar.response import Stream as HttpStream

from omni_rt.errors import BadRequest, OmniError
from omni_rt.request import ChatMessage, Done, Image, Output, Request, Text
from omni_rt.runtime.stream import Stream
from omni_rt.server import sse
from omni_rt.server.errors import ErrorReply, reply_of
from omni_rt.server.gone import unless_gone
from omni_rt.server.state import Served, set_fields, size_params

_Count = Annotated[int, msgspec.Meta(ge=1, le=16)]


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatBody(msgspec.Struct):
    """The request, after OpenAI's reference. Extensions: size, num_inference_steps, ..."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _Count | None = None
    modalities: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    size: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    user: str | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    logit_bias: dict[str, float] | None = None
    audio: dict[str, Any] | None = None


# Fields of OpenAI's that are not served yet: refused rather than ignored.
_REFUSED = ("tools", "logit_bias", "audio")


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
    served.note_unknown(await request.json(), ChatBody.__struct_fields__)
    served.check_ready()
    requests = [_request(served, data, k) for k in range(data.n or 1)]
    streams = served.submit_all(requests)
    head = (f"chatcmpl-{streams[0].id}", int(time.time()), served.name)
    if data.stream:
        usage = bool(data.stream_options and data.stream_options.include_usage)
        return HttpStream(
            _events(streams, head, usage), media_type="text/event-stream", status_code=200
        )
    outputs = await unless_gone(request, _collect_all(streams))
    return Response(_completion(outputs, head))


# ---- in


def _request(served: Served, body: ChatBody, index: int) -> Request:
    for name in _REFUSED:
        if getattr(body, name) is not None:
            raise BadRequest(f"'{name}' is not supported yet", param=name, hint="leave it out")
    if body.logprobs:
        raise BadRequest("'logprobs' is not supported yet", param="logprobs", hint="leave it out")
    if body.response_format and body.response_format.get("type") != "text":
        raise BadRequest("only response_format 'text' is supported", param="response_format")
    if not body.messages:
        raise BadRequest("messages is empty", param="messages")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    params = set_fields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_tokens=_max_tokens(body),
        stop=stop,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        num_inference_steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
    )
    kinds = body.modalities
    return Request(
        messages=tuple(_message(message, k) for k, message in enumerate(body.messages)),
        outputs=() if kinds is None else served.outputs_of(kinds, "modalities"),
        params={**params, **size_params(body.size)},
        seed=None if body.seed is None else body.seed + index,
        label=(body.user or "")[:64],
    )


def _max_tokens(body: ChatBody) -> int | None:
    newer = body.max_completion_tokens
    return body.max_tokens if newer is None else newer


def _message(message: Message, index: int) -> ChatMessage:
    content = message.content
    if isinstance(content, list):
        for k, part in enumerate(content):
            if part.type != "text":
                raise BadRequest(
                    f"this model takes text only, not '{part.type}'",
                    param=f"messages[{index}].content[{k}].type",
                )
        content = "".join(part.text or "" for part in content)
    return ChatMessage(message.role, content or "")


# ---- out, whole


async def _collect_all(streams: list[Stream]) -> list[list[Output]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_collect(stream)) for stream in streams]
    return [task.result() for task in tasks]


async def _collect(stream: Stream) -> list[Output]:
    async with stream:
        return [output async for output in stream]


def _completion(outputs: list[list[Output]], head: tuple[str, int, str]) -> Completion:
    choices = [_choice(each, k) for k, each in enumerate(outputs)]
    ends = [done for each in outputs if isinstance(done := each[-1], Done)]
    return Completion(*head, choices, _usage(ends), ends[0].seed)


def _choice(outputs: list[Output], index: int) -> Choice:
    text = "".join(output.text for output in outputs if isinstance(output, Text))
    images = [_image_part(output) for output in outputs if isinstance(output, Image)]
    done = outputs[-1]
    assert isinstance(done, Done)
    return Choice(index, Reply("assistant", text, images or None), done.finish_reason)


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
) -> AsyncIterator[bytes]:
    ends: list[Done] = []
    try:
        for k in range(len(streams)):
            yield _event(head, k, Reply("assistant", ""))
        async for k, output in sse.merged(streams):
            if isinstance(output, Text):
                yield _event(head, k, Reply(content=output.text))
            elif isinstance(output, Image):
                yield _event(head, k, Reply(images=[_image_part(output)]))
            elif isinstance(output, Done):
                ends.append(output)
                yield _event(head, k, Reply(), output.finish_reason)
        if with_usage:
            yield sse.data(Delta(*head, [], _usage(ends)))
    except OmniError as error:
        yield sse.data(ErrorReply(reply_of(error)[1]))
    finally:
        for stream in streams:
            await stream.aclose()
    yield sse.DONE


def _event(
    head: tuple[str, int, str], index: int, delta: Reply, reason: str | None = None
) -> bytes:
    return sse.data(Delta(*head, [DeltaChoice(index, delta, reason)]))
