"""POST /v1/images/generations."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request as HttpRequest
from litestar import post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from omni_rt.errors import BadRequest
from omni_rt.request import Image, Request, Text
from omni_rt.runtime.stream import Stream
from omni_rt.server.chat import data_url
from omni_rt.server.gone import unless_gone
from omni_rt.server.state import PictureFields, Seed, Served

_Count = Annotated[int, msgspec.Meta(ge=1, le=10)]


class ImageBody(PictureFields, kw_only=True):
    """The request, after OpenAI's reference, with extensions."""

    prompt: str
    model: str | None = None  # any name: clients of image routes send fixed ones
    n: _Count | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png"] | None = None
    quality: Literal["auto", "standard", "high", "medium", "low", "hd"] | None = None
    background: Literal["auto", "opaque"] | None = None
    user: str | None = None
    stream: bool | None = None
    seed: Seed | None = None


class Picture(msgspec.Struct, omit_defaults=True):
    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    seed: int | None = None


class ImageReply(msgspec.Struct):
    created: int
    data: list[Picture]
    output_format: str
    size: str


@post("/v1/images/generations", status_code=200)
async def generate_images(
    request: HttpRequest[Any, Any, Any], served: NamedDependency[Served], data: JSONBody[ImageBody]
) -> ImageReply:
    served.check_unknown(await request.json(), ImageBody.__struct_fields__)
    if data.stream:
        raise BadRequest("images are not streamed yet", param="stream", hint="leave it out")
    if not data.prompt.strip():
        raise BadRequest("the prompt is empty", param="prompt")
    served.check_ready()
    requests = _requests(served, data)
    streams = served.submit_all(requests)
    made = await unless_gone(request, _all(streams))
    pictures = [_picture(image, text, data.response_format) for image, text in made]
    first = made[0][0]
    return ImageReply(int(time.time()), pictures, "png", f"{first.width}x{first.height}")


def _requests(served: Served, body: ImageBody) -> list[Request]:
    outputs = served.outputs_of(["image"], "model")
    texts = tuple(name for name, kind in served.omni.kinds().items() if kind == "text")
    seed = secrets.randbelow(2**31 - 16) if body.seed is None else body.seed
    return [
        Request(
            prompt=body.prompt,
            outputs=(*outputs, *texts),  # the text says why, if there is no picture
            params=body.params(),
            seed=seed + k,
            label=(body.user or "")[:64],
        )
        for k in range(body.n or 1)
    ]


async def _all(streams: list[Stream]) -> list[tuple[Image, str]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one(stream)) for stream in streams]
    return [task.result() for task in tasks]


async def _one(stream: Stream) -> tuple[Image, str]:
    """The picture and what the model said to it. Raises `BadRequest` if it made none."""
    image: Image | None = None
    text = ""
    async with stream:
        async for output in stream:
            if isinstance(output, Text):
                text += output.text
            elif isinstance(output, Image):
                image = output
    if image is None:
        said = f": {text}" if text else ""
        raise BadRequest(f"the model answered without a picture{said}", param="prompt")
    return image, text


def _picture(image: Image, text: str, form: str | None) -> Picture:
    picture = Picture(revised_prompt=text or None, seed=image.seed)
    if form == "url":
        picture.url = data_url(image)
    else:
        picture.b64_json = base64.b64encode(image.data).decode()
    return picture
