"""No body, however odd, is answered with a 5xx or an empty 200."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.server.serving import site

_FIELDS = ("messages", "model", "n", "seed", "size", "stop", "stream", "modalities", "max_tokens")
_VALUES: list[Any] = [
    None, True, -1, 0, 3, 2**70, 1e308, "", "x", "world", [], ["text"], {}, {"a": 1},
    [{"role": "user", "content": "hi"}], [{"role": None}], [{"role": "user", "content": [{}]}],
    "\u0000", "\ud83d\ude00" * 50, [[[[]]]],
]  # fmt: skip


def _body(rng: random.Random) -> bytes:
    chosen = rng.sample(_FIELDS, rng.randint(0, len(_FIELDS)))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    body |= {name: rng.choice(_VALUES) for name in chosen}
    data = json.dumps(body).encode()
    return data[: rng.randrange(len(data))] if rng.random() < 0.1 else data


async def test_odd_bodies_are_answered_or_refused() -> None:
    rng = random.Random(0)
    seen = set()
    async with site() as where:
        for _ in range(300):
            body = _body(rng)
            for path in ("/v1/chat/completions", "/v1/images/generations"):
                reply = await where.http.post(path, content=body)
                seen.add(reply.status_code)
                assert reply.status_code < 500, (body, reply.text)
                assert reply.content, body
                if reply.status_code >= 400:
                    assert reply.json()["error"]["message"], body
        assert where.omni.status().live == 0
    assert seen >= {200, 400}
