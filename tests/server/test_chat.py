"""POST /v1/chat/completions, as OpenAI's own client and others call it."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import openai
import pytest

from omni_rt.request import Output, Text
from omni_rt.runtime.stream import Stream
from tests.server.serving import PIPELINE, Site, site, until

SLOW = PIPELINE.replace("steps: 8", "steps: 100000")
ECHO = """
name: world
stages:
  echo: {engine: echo, arena: 4MiB}
outputs: {text: echo.text}
"""


PNG = "data:image/png;base64,iVBORw0KGgo="
_AT = "messages[0].content[0].image"


def _parts(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def _ask(text: str = "draw", **more: Any) -> dict[str, Any]:
    return {"model": "world", "messages": [{"role": "user", "content": text}], **more}


async def _chat(where: Site, **more: Any) -> Any:
    return await where.http.post("/v1/chat/completions", json=_ask(**more))


async def test_text_and_picture_come_in_one_message() -> None:
    async with site() as where:
        reply = (await _chat(where, seed=5)).json()
    message = reply["choices"][0]["message"]
    assert len(message["content"]) == 8 * 32
    prefix, data = message["images"][0]["image_url"]["url"].split(",")
    assert prefix == "data:image/png;base64"
    assert base64.b64decode(data).startswith(b"\x89PNG")
    assert reply["object"] == "chat.completion"
    assert reply["seed"] == 5
    assert reply["choices"][0]["finish_reason"] == "stop"


async def test_the_openai_client_understands_whole_and_streamed_replies() -> None:
    async with site() as where, openai.AsyncOpenAI(base_url=f"{where.url}/v1", api_key="x") as sdk:
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "draw"}]}]
        whole = await sdk.chat.completions.create(model="world", messages=messages, seed=1)
        pieces, images, ends, usage = [], 0, [], None
        stream = await sdk.chat.completions.create(
            model="world",
            messages=messages,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                images += len((choice.delta.model_extra or {}).get("images", []))
                ends.append(choice.finish_reason)
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) == 8
    assert images == 1
    assert [end for end in ends if end] == ["stop"]
    assert usage is not None


async def test_modalities_decide_what_is_made() -> None:
    async with site() as where:
        text = (await _chat(where, modalities=["text"])).json()["choices"][0]["message"]
        assert "images" not in text
        refused = await _chat(where, modalities=["audio"])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "modalities"


async def test_n_replies_have_their_own_index_and_seed() -> None:
    async with site() as where:
        reply = (await _chat(where, n=3, seed=7)).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert where.omni.status().counters["accepted"] == 3


async def test_n_replies_are_accepted_all_or_none() -> None:
    async with site(text=SLOW % {"fact": "image"}) as where:
        tasks = [asyncio.create_task(_chat(where, text=str(k))) for k in range(12)]
        await until(lambda: where.omni.status().live == 12)  # there is room for 8 more
        refused = await _chat(where, n=9)
        assert refused.status_code == 429
        await until(lambda: where.omni.status().live == 12)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_picture_that_the_model_did_not_want_is_left_out() -> None:
    async with site(fact="other") as where:
        message = (await _chat(where)).json()["choices"][0]["message"]
    assert "images" not in message
    assert message["content"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": "x"}, "messages"),
        ({}, "messages"),
        (_ask(n=0), "n"),
        (_ask(temperature=0.5), "temperature"),  # no stage here has one
        (_ask(max_tokens="many"), "max_tokens"),
        (_ask(size="big"), "size"),
        (_ask(tools=[{}]), "tools"),
        (_ask(logprobs=True), "logprobs"),
        (_ask(functions=[{}]), "functions"),
        (_ask(width=64), "width"),
        (_ask(size="64x64"), "size"),  # no stage here has one
        (_ask(extra_body={"size": "64x64"}), "size"),
        (_ask(extra_body={"cfg": 1}), "extra_body.cfg"),
        (_ask(negative_prompt="x"), "negative_prompt"),
        (_ask(modalities=[]), "modalities"),
        (_ask(stop=["a", ""]), "stop"),
        (_ask(seed=-1), "seed"),
        (_ask(seed=2**64), "seed"),
        (_ask(max_tokens=2**64), "max_tokens"),
        (_ask(text=" "), "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "|>", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
            "messages[0].content[0].type",
        ),
        (
            _parts({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}),
            f"{_AT}_url.url",
        ),
        (
            _parts({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}),
            f"{_AT}_url.url",
        ),
        (_parts({"type": "image_url", "image_url": {"url": PNG}}), "messages[0].content"),
        ({"messages": [{"role": "user", "content": ""}], "seed": 1.5}, "seed"),
    ],
)
async def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    async with site() as where:
        reply = await where.http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_fields_that_ask_for_nothing_are_accepted() -> None:
    nothing = {
        "tools": [],
        "tool_choice": "auto",
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": 0,
        "stop": [],
        "temperature": None,
        "stream_options": {"include_usage": None},
        "extra_body": {},
        "metadata": {"mine": "x"},
    }
    async with site() as where:
        reply = await _chat(where, **nothing)
    assert reply.status_code == 200, reply.text


async def test_zero_is_a_value() -> None:
    async with site(text=ECHO) as where:
        one = (await _chat(where, text="one two", max_tokens=1, seed=0)).json()
        newer = (await _chat(where, text="one two", max_tokens=1, max_completion_tokens=2)).json()
        none = await _chat(where, text="one two", max_tokens=0)
    assert one["choices"][0]["message"]["content"] == "one"
    assert one["seed"] == 0
    assert newer["choices"][0]["message"]["content"] == "one two"
    assert none.json()["error"]["param"] == "max_tokens"


async def test_errors_have_one_shape_and_the_right_status() -> None:
    async with site() as where:
        http = where.http
        broken = await http.post("/v1/chat/completions", content=b"{oops")
        model = await http.post("/v1/chat/completions", json={**_ask(), "model": "gpt-9"})
        nowhere = await http.get("/v1/nowhere")
        method = await http.get("/v1/chat/completions")
        big = await http.post("/v1/chat/completions", content=b" " * (33 << 20))
    for reply, status in ((broken, 400), (model, 404), (nowhere, 404), (method, 405), (big, 413)):
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert "world" in model.json()["error"]["message"]
    assert broken.headers["x-request-id"]


async def test_a_full_queue_is_429_with_retry_after() -> None:
    async with site(text=SLOW % {"fact": "image"}) as where:
        tasks = [asyncio.create_task(_chat(where, text=str(k))) for k in range(20)]
        await until(lambda: where.omni.status().live == 20)  # 16 in the engine, 4 wait
        refused = await _chat(where)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: where.omni.status().live == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_stops_its_request(stream: bool) -> None:
    async with site(text=SLOW % {"fact": "image"}) as where:
        task = asyncio.create_task(_read(where, stream))
        await until(lambda: where.omni.status().stages["writer"].running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: where.omni.status().live == 0, 2)
        assert where.omni.status().counters["cancelled"] == 1
        assert where.omni.status().stages["writer"].running == 0


async def _read(where: Site, stream: bool) -> None:
    body = _ask(stream=stream)
    async with where.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for _ in reply.aiter_bytes():
            pass


async def test_a_client_that_goes_away_stops_its_request_while_it_still_waits() -> None:
    async with site(text=SLOW % {"fact": "image"}) as where:
        tasks = [asyncio.create_task(_chat(where, text=str(k))) for k in range(17)]
        await until(lambda: where.omni.status().stages["writer"].queued == 1)
        streamed = asyncio.create_task(_read(where, stream=True))
        await until(lambda: where.omni.status().live == 18)
        streamed.cancel()
        await until(lambda: where.omni.status().live == 17, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(streamed, *tasks, return_exceptions=True)


async def test_an_error_before_a_stream_begins_has_its_own_status() -> None:
    """The worker finds it, when the request has long been accepted."""
    nothing_last = [{"role": "system", "content": "x"}, {"role": "user", "content": ""}]
    async with site(text=ECHO) as where:
        reply = await _chat(where, messages=nothing_last, stream=True)
        assert where.omni.status().counters["accepted"] == 1
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "the prompt is empty"


async def test_a_failure_in_the_middle_of_a_stream_is_told_and_ends_it() -> None:
    async with site(text=SLOW % {"fact": "image"}) as where:
        lines = []
        async with where.http.stream(
            "POST", "/v1/chat/completions", json=_ask(stream=True)
        ) as reply:
            async for line in reply.aiter_lines():
                if not line:
                    continue
                lines.append(line)
                if len(lines) == 3:
                    request_id = json.loads(lines[0].removeprefix("data: "))["id"]
                    done = await where.http.post(f"/v1/requests/{request_id}/cancel")
                    assert done.json() == {"id": request_id, "cancelled": True}
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "cancelled"
    assert lines[-1] == "data: [DONE]"


async def test_a_bug_in_the_middle_of_a_stream_is_told_and_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(stream: Stream) -> Output:
        if stream.id in begun:
            raise ZeroDivisionError("ours")
        begun.add(stream.id)
        return Text("x")

    begun: set[str] = set()
    async with site(text=ECHO) as where:
        monkeypatch.setattr(Stream, "__anext__", broken)
        reply = await _chat(where, stream=True)
    lines = [line for line in reply.text.splitlines() if line]
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["code"] == "internal"
    assert "ours" not in error["message"]  # in the log, whole
    assert "ZeroDivisionError: ours" in caplog.text
    assert lines[-1] == "data: [DONE]"


async def test_an_unknown_request_cannot_be_cancelled() -> None:
    async with site() as where:
        reply = await where.http.post("/v1/requests/none/cancel")
    assert reply.status_code == 404
