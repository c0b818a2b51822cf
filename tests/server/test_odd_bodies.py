"""No body, however odd, is answered with a 5xx or an empty 200, and none leaves anything behind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

from tests.server.serving import PIPELINE, site

_QUICK = (
    PIPELINE.replace("0.002", "0").replace("steps: 8", "steps: 1").replace("steps: 5", "steps: 1")
)
_PATHS = ("/v1/chat/completions", "/v1/images/generations")
_FIELDS = (
    "messages", "prompt", "model", "n", "seed", "size", "stop", "stream", "modalities",
    "max_tokens", "num_inference_steps", "guidance_scale", "stream_options", "extra_body", "user",
    "response_format", "unknown",
)  # fmt: skip
_VALUES: list[Any] = [
    None, True, -1, 0, 3, 2**63, 2**70, -(2**70), 1e308, "", "x", "1x1", "0x0", "world",
    [], [""], ["text"], ["text", "text"], {}, {"a": 1}, {"type": 1},
    [{"role": "user", "content": "hi"}], [{"role": None}], [{"role": "user", "content": [{}]}],
    "\u0000", "\ud83d\ude00" * 50, [[[[]]]],
]  # fmt: skip
_RAW = [
    b"", b" ", b"null", b"[]", b'"x"', b"\xff\xfe", b"{", b"[" * 100_000, b"{}{}", b'{"n": NaN}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "hi"}], "a": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
]  # fmt: skip


def _good() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


def _bodies() -> Iterator[bytes]:
    yield from _RAW
    for name in _FIELDS:
        for value in _VALUES:
            yield json.dumps(_good() | {name: value}).encode()
    rng = random.Random(0)
    for _ in range(100):
        names = rng.sample(_FIELDS, rng.randint(2, 6))
        data = json.dumps(_good() | {name: rng.choice(_VALUES) for name in names}).encode()
        yield data[: rng.randrange(len(data))] if rng.random() < 0.2 else data


def _check(reply: httpx.Response, body: bytes) -> None:
    assert reply.status_code < 500, (body[:200], reply.text)
    assert reply.content, body[:200]
    if reply.status_code >= 400:
        assert reply.json()["error"]["message"], body[:200]
    else:
        assert "error" not in reply.text, body[:200]


async def test_odd_bodies_are_answered_or_refused() -> None:
    seen = set()
    async with site(text=_QUICK) as where:
        for body in _bodies():
            for path in _PATHS:
                reply = await where.http.post(path, content=body)
                seen.add(reply.status_code)
                _check(reply, body)
        assert where.omni.status().live == 0
    assert seen == {200, 400, 404}
