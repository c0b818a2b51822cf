"""Speech over POST /v1/chat/completions, whole and streamed, as OpenAI's own client asks for it."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import openai
import pytest

from omni_rt.request import Audio, Request
from tests.runtime.real import collect
from tests.server.serving import Site, site

SPEECH = """
name: world
stages:
  writer:
    engine: simulated
    arena: 4MiB
    simulated: {step_s: 0.001, steps: 8, ports: {text: {every: 1}, codes: {bytes: 64, every: 1}}}
  vocoder:
    engine: simulated
    arena: 4MiB
    simulated:
      step_s: 0.001
      inputs: [codes]
      ports: {audio: {kind: audio, bytes: 6000, every: 1, sample_rate: 16000}}
edges:
  - {from: writer.codes, to: vocoder.codes, stream: true}
outputs: {text: writer.text, audio: vocoder.audio}
"""
BOTH: Any = ["text", "audio"]


def _ask(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "say it"}], "modalities": BOTH, **more}


async def _chat(where: Site, **more: Any) -> Any:
    return await where.http.post("/v1/chat/completions", json=_ask(**more))


async def _samples(where: Site) -> bytes:
    """What the stage gives for the same request, piece by piece."""
    outputs = await collect(where.omni, Request(prompt="say it", seed=1))
    return b"".join(output.data for output in outputs if isinstance(output, Audio))


async def test_a_whole_reply_has_all_samples_in_one_wav_file() -> None:
    async with site(text=SPEECH) as where:
        reply = (await _chat(where)).json()
        expected = await _samples(where)
    message = reply["choices"][0]["message"]
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16000)
        assert file.readframes(file.getnframes()) == expected
    assert len(expected) == 8 * 6000
    assert message["audio"]["transcript"] == message["content"] != ""
    assert message["audio"]["expires_at"] == reply["created"]


async def test_a_whole_reply_can_be_bare_samples() -> None:
    async with site(text=SPEECH) as where:
        reply = (await _chat(where, audio={"format": "pcm16", "voice": "any"})).json()
        expected = await _samples(where)
    assert base64.b64decode(reply["choices"][0]["message"]["audio"]["data"]) == expected


async def test_the_openai_client_plays_speech_while_it_comes() -> None:
    async with (
        site(text=SPEECH) as where,
        openai.AsyncOpenAI(base_url=f"{where.url}/v1", api_key="x") as sdk,
    ):
        stream = await sdk.chat.completions.create(
            model="world",
            messages=[{"role": "user", "content": "say it"}],
            modalities=BOTH,
            audio={"voice": "alloy", "format": "pcm16"},
            stream=True,
        )
        sounds, words, transcript, ends, expires = [], "", "", [], []
        async for chunk in stream:
            delta = chunk.choices[0].delta
            words += delta.content or ""
            ends.append(chunk.choices[0].finish_reason)
            if delta.audio is not None:
                transcript += delta.audio.transcript or ""
                expires.append(delta.audio.expires_at)
                if delta.audio.data is not None:
                    sounds.append(base64.b64decode(delta.audio.data))
        expected = await _samples(where)
    assert len(sounds) == 8
    assert b"".join(sounds) == expected
    assert transcript == words != ""
    assert [at is not None for at in expires] == [False] * 8 + [True]
    assert ends[-1] == "stop"


async def test_text_alone_needs_no_speech() -> None:
    async with site(text=SPEECH) as where:
        reply = (await _chat(where, modalities=["text"])).json()
    assert "audio" not in reply["choices"][0]["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"modalities": ["text"], "audio": {"voice": "x"}}, "audio"),
        ({"stream": True, "audio": {"format": "wav"}}, "audio.format"),
        ({"audio": {"format": "mp3"}}, "audio.format"),
        ({"audio": {"voice": 3}}, "audio.voice"),
        ({"audio": {"speed": 2}}, "audio.speed"),
    ],
)
async def test_what_cannot_be_spoken_is_refused_by_name(more: Any, param: str) -> None:
    async with site(text=SPEECH) as where:
        refused = await _chat(where, **more)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


async def test_a_voice_where_nobody_speaks_is_refused() -> None:
    text = SPEECH.replace("kind: audio, ", "").replace(", sample_rate: 16000", "")
    async with site(text=text) as where:
        refused = await _chat(where, modalities=None, audio={"voice": "x"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "audio.voice"


async def test_pieces_are_numbered_in_order() -> None:
    async with site(text=SPEECH) as where:
        outputs = await collect(where.omni, Request(prompt="say it"))
    pieces = [output for output in outputs if isinstance(output, Audio)]
    assert [piece.index for piece in pieces] == list(range(8))
    assert {(piece.media_type, piece.sample_rate) for piece in pieces} == {("audio/pcm", 16000)}
