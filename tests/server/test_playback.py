"""A streamed reply with sound that nobody could listen to is refused, over HTTP."""

from __future__ import annotations

from typing import Any

from omni_rt.request import Audio, Request
from tests.server.serving import Site, site

# One at a time, and it does not end by itself while the test runs.
SPEECH = """
name: world
stages:
  writer:
    engine: simulated
    simulated: {step_s: 0.001, steps: 8, ports: {text: {every: 1}, codes: {bytes: 64, every: 1}}}
  vocoder:
    engine: simulated
    max_batch: 1
    simulated:
      step_s: 0.02
      repeat: 1000
      inputs: [codes]
      ports: {audio: {kind: audio, bytes: 4800, every: 1}}
edges:
  - {from: writer.codes, to: vocoder.codes, stream: true}
outputs: {text: writer.text, audio: vocoder.audio}
"""


async def _ask(where: Site, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "say it"}], **more}
    return await where.http.post("/v1/chat/completions", json=body)


async def test_streamed_speech_without_a_place_is_refused_with_a_time_to_come_again() -> None:
    async with site(text=SPEECH) as where:
        async with where.omni.submit(Request(prompt="long", playback=True)) as speech:
            async for output in speech:
                if isinstance(output, Audio):
                    break
            refused = await _ask(where, modalities=["text", "audio"], stream=True)
            text = await _ask(where, modalities=["text"], stream=True)
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "overloaded"
    assert "stage vocoder has no place free" in error["message"]
    assert text.status_code == 200
