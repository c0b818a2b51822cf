"""What OpenAI's own client gets of a vLLM stage: log-probabilities, grammars, calls of tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

from tests.server.serving import Site, site

from .test_adapters import CALL, TOOL
from .test_parameters import SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model

PIPELINE = """
name: tiny
model: {folder}
stages:
  writer:
    engine: vllm
    device: cpu
    arena: 4MiB
    tool_parser: hermes
    vllm: {{structured_outputs_config: {{backend: xgrammar, disable_any_whitespace: true}}}}
outputs: {{text: writer.text}}
"""
ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "say it"}]}


async def test_openais_client_gets_what_it_asks_for(folder: Path) -> None:
    async with (
        site(text=PIPELINE.format(folder=folder)) as where,
        openai.AsyncOpenAI(base_url=f"{where.url}/v1", api_key="x", timeout=60) as sdk,
    ):
        await log_probabilities(sdk)
        await grammars(sdk)
        await calls(sdk)
        await replies(sdk)
        await refusals(where)


async def log_probabilities(sdk: openai.AsyncOpenAI) -> None:
    more: Any = {"logprobs": True, "top_logprobs": 2, "max_tokens": 5, "temperature": 0}
    ignore = {"ignore_eos": True}
    whole = await sdk.chat.completions.create(**ASKED, **more, extra_body=ignore)
    found = whole.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 5
    for token in found.content:
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert bytes(token.bytes or []).decode() == token.token
    stream = await sdk.chat.completions.create(**ASKED, **more, extra_body=ignore, stream=True)
    streamed = [
        token
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert [token.token for token in streamed] == [token.token for token in found.content]


async def grammars(sdk: openai.AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    whole = await sdk.chat.completions.create(**ASKED, response_format=form, max_tokens=100)
    jsonschema.validate(json.loads(whole.choices[0].message.content or ""), SCHEMA)


async def calls(sdk: openai.AsyncOpenAI) -> None:
    more: Any = {"tools": [TOOL], "extra_body": {"structured_outputs": {"choice": [CALL]}}}
    whole = await sdk.chat.completions.create(**ASKED, **more)
    (call,) = whole.choices[0].message.tool_calls or []
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"place": "Oslo"},
    )
    stream = await sdk.chat.completions.create(**ASKED, **more, stream=True)
    name, arguments, ends = "", "", []
    async for chunk in stream:
        for choice in chunk.choices:
            ends.append(choice.finish_reason)
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    assert (name, json.loads(arguments)) == ("weather", {"place": "Oslo"})
    assert [end for end in ends if end] == ["tool_calls"]
    said: Any = [
        *ASKED["messages"],
        whole.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "cold"},
    ]
    after = await sdk.chat.completions.create(model="tiny", messages=said, max_tokens=3)
    assert after.usage is not None
    assert after.usage.completion_tokens <= 3


async def replies(sdk: openai.AsyncOpenAI) -> None:
    more: Any = {"n": 3, "seed": 5, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    first = await sdk.chat.completions.create(**ASKED, **more)
    again = await sdk.chat.completions.create(**ASKED, **more)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    assert first.usage is not None
    assert first.usage.completion_tokens == 18


async def refusals(where: Site) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    for more, param in (
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "(("}}, None),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"lora": "nobody"}, "lora"),
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content"),
    ):
        reply = await where.http.post("/v1/chat/completions", json={**ASKED, **more})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param), error
