"""POST /v1/images/generations."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest

from tests.server.serving import site


async def test_the_openai_client_gets_n_pictures_with_seeds_that_count_up() -> None:
    async with site() as where, openai.AsyncOpenAI(base_url=f"{where.url}/v1", api_key="x") as sdk:
        reply = await sdk.images.generate(
            prompt="a circle", n=2, model="gpt-image-1", extra_body={"seed": 40}
        )
    assert reply.data is not None
    assert [picture.model_extra["seed"] for picture in reply.data if picture.model_extra] == [
        40,
        41,
    ]
    for picture in reply.data:
        assert base64.b64decode(picture.b64_json or "").startswith(b"\x89PNG")


async def test_url_means_a_data_url() -> None:
    async with site() as where:
        body = {"prompt": "x", "response_format": "url"}
        reply = (await where.http.post("/v1/images/generations", json=body)).json()
    assert reply["data"][0]["url"].startswith("data:image/png;base64,")
    assert reply["size"] == "8x8"


async def test_no_picture_is_an_error_with_the_models_words() -> None:
    async with site(fact="other") as where:
        reply = await where.http.post("/v1/images/generations", json={"prompt": "x"})
    assert reply.status_code == 400
    assert "without a picture: " in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 11}, "n"),
        ({"size": "1x"}, "size"),
        ({"prompt": " "}, "prompt"),
        ({"stream": True}, "stream"),
        ({"output_format": "webp"}, "output_format"),
        ({"guidance_scale": 4.0}, "guidance_scale"),  # no stage here has one
        ({"scheduler": "EulerDiscreteScheduler"}, "scheduler"),
        ({"exact": True}, "exact"),
        ({"exact": "yes"}, "exact"),
    ],
)
async def test_a_wrong_field_is_named(more: dict[str, Any], param: str) -> None:
    async with site() as where:
        reply = await where.http.post("/v1/images/generations", json={"prompt": "x", **more})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
